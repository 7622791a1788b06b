"""Tekken files for tests: the one that mistral-common ships, and small ones of it of any version.
In the workspace all of it is skipped."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from toolkit_lm.config import Checkpoint, VllmConfig

NUM_SPECIAL = 100
NUM_ORDINARY = 3000
LATER_TOKENS = (
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
    "[MODEL_SETTINGS]",
    "[/MODEL_SETTINGS]",
)


@pytest.fixture(scope="session")
def bundled_tekken():
    mistral_common = pytest.importorskip("mistral_common")
    return Path(mistral_common.__file__).parent / "data" / "tekken_240718.json"


@pytest.fixture(scope="session")
def write_tekken(bundled_tekken):
    """write_tekken(folder, version): the beginning of the bundled vocabulary, and the special
    tokens of that version."""
    whole = json.loads(bundled_tekken.read_text())

    def write(folder: Path, version: str = "v3") -> Path:
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        tokens = [
            str(getattr(one["token_str"], "value", one["token_str"]))
            for one in Tekkenizer.DEPRECATED_SPECIAL_TOKENS
        ]
        special = [
            {"rank": i, "token_str": one, "is_control": True}
            for i, one in enumerate([*tokens, *LATER_TOKENS])
        ]
        config = whole["config"] | {
            "default_vocab_size": NUM_SPECIAL + NUM_ORDINARY,
            "default_num_special_tokens": NUM_SPECIAL,
        }
        tekken = {
            "config": config | {"version": version},
            "vocab": whole["vocab"][:NUM_ORDINARY],
            "special_tokens": special,
        }
        if version == "v15":
            tekken["model_settings_builder"] = {
                "reasoning_effort": {
                    "type": "enum",
                    "accepts_none": True,
                    "default": "none",
                    "values": ["none", "high"],
                }
            }
        path = folder / "tekken.json"
        path.write_text(json.dumps(tekken))
        return path

    return write


@pytest.fixture
def make_renderer(tmp_path, write_tekken):
    """make_renderer(version, hf_config={}, generation_config={}, **options)."""

    def make(version="v3", *, hf_config=None, generation_config=None, **options):
        from toolkit_lm_renderer_mistral.renderer import MistralRenderer

        write_tekken(tmp_path, version)
        resolved = VllmConfig.default(hf_config=hf_config or {}, **options)
        checkpoint = Checkpoint(
            path=str(tmp_path),
            architecture="none",
            hf_config=hf_config or {},
            generation_config=generation_config or {},
        )
        return MistralRenderer(msgspec.structs.replace(resolved, checkpoint=checkpoint))

    return make
