"""Errors without mistral-common, and cases that do not need it. Needs no mistral-common."""

import json
import subprocess
import sys

import pytest

pytest.importorskip(
    "toolkit_lm_renderer_mistral", reason="toolkit-lm-renderer-mistral is not installed"
)

from toolkit_lm.config import Checkpoint, VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm_renderer_mistral import tekken
from toolkit_lm_renderer_mistral.renderer import MistralRenderer


def config_of(folder, **options):
    config = VllmConfig.default({}, model=str(folder), **options)
    return config.with_checkpoint(
        Checkpoint(path=str(folder), architecture="none", hf_config={}, generation_config={})
    )


@pytest.fixture
def without_library(monkeypatch):
    monkeypatch.setattr(tekken.importlib.util, "find_spec", lambda name: None)


def test_it_says_what_to_install(without_library, tmp_path):
    (tmp_path / "tekken.json").write_text("{}")
    reason = MistralRenderer.refuses(config_of(tmp_path))
    assert "pip install 'toolkit-lm-renderer-mistral[mistral]'" in reason
    with pytest.raises(ConfigError, match="mistral-common is not installed"):
        MistralRenderer(config_of(tmp_path))


def test_a_chat_template_is_refused(tmp_path):
    assert "chat_template" in MistralRenderer.refuses(
        config_of(tmp_path, chat_template="{{ messages }}")
    )


def test_importing_it_imports_nothing_heavy():
    code = (
        "import sys, json, toolkit_lm_renderer_mistral.renderer; "
        "print(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert not {"torch", "mistral_common", "tiktoken", "numpy", "pydantic", "transformers"} & set(
        json.loads(done.stdout)
    )
