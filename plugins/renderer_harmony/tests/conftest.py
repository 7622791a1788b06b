"""The vocabulary of gpt-oss, which the package litellm carries, and renderers of it. In the
workspace all of it is skipped."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import msgspec
import pytest
from toolkit_lm.config import Checkpoint, VllmConfig

CARRIED = "litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"


@pytest.fixture(scope="session")
def vocabulary() -> Path:
    """o200k_base.tiktoken."""
    pytest.importorskip("openai_harmony")
    # Without importing it: that takes seconds.
    found = importlib.util.find_spec("litellm")
    if found is None or found.origin is None:
        pytest.skip("the vocabulary is not here: the package litellm carries it")
    return Path(found.origin).parent / CARRIED


@pytest.fixture(scope="session")
def harmony_folder(vocabulary, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("harmony")
    shutil.copy(vocabulary, made / "o200k_base.tiktoken")
    return made


def _resolved(folder: Path, hf_config=None, generation_config=None, **options) -> VllmConfig:
    config = VllmConfig.default(hf_config or {}, **options)
    checkpoint = Checkpoint(
        path=str(folder),
        architecture="none",
        hf_config=hf_config or {},
        generation_config=generation_config or {},
    )
    return msgspec.structs.replace(config, checkpoint=checkpoint)


@pytest.fixture(scope="session")
def renderer(harmony_folder):
    from toolkit_lm_renderer_harmony.renderer import HarmonyRenderer

    return HarmonyRenderer(_resolved(harmony_folder))


@pytest.fixture(scope="session")
def resolved():
    """resolved(folder, hf_config=None, generation_config=None, **options): a config of a checkpoint
    there."""
    return _resolved
