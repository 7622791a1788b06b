"""The conformance kit for renderers."""

import importlib.util
import shutil
from pathlib import Path

import pytest

pytest.importorskip(
    "openai_harmony", reason="openai-harmony has an environment of its own: make test-renderers"
)
if (carrier := importlib.util.find_spec("litellm")) is None or carrier.origin is None:
    pytest.skip(
        "the vocabulary is not here: the package litellm carries it", allow_module_level=True
    )

from toolkit_lm_devkit import RendererConformance
from toolkit_lm_renderer_harmony.renderer import HarmonyRenderer

VOCABULARY = (
    Path(carrier.origin).parent
    / "litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"
)


class TestHarmony(RendererConformance):
    renderer_class = HarmonyRenderer

    def write_files(self, folder):
        shutil.copy(VOCABULARY, folder / "o200k_base.tiktoken")
