"""Code that a checkpoint brings along runs only where it is trusted, and never in place of a class
of transformers."""

import json
import sys

import pytest
import transformers
from fallback_harness import check_parity, generate, save
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm_transformers.model import TransformersForCausalLM

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
CODE = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM

sys.remote_code_ran = True

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A Llama whose config names a class of its own, in a file beside it."""
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "remote_code_ran", False, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "checkpoint"
    model = save("Llama", folder, **SHAPE)
    (folder / "mine.py").write_text(CODE)
    auto_map = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    rewrite(folder, model_type="mine", architectures=["MineForCausalLM"], auto_map=auto_map)
    return folder, model


def rewrite(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(folder, **options):
    return TransformersForCausalLM.refuses(
        VllmConfig.default(json.loads((folder / "config.json").read_text()), **options)
    )


def test_it_is_refused_unless_trusted(remote):
    assert refusal(remote[0]) == (
        "MineForCausalLM is code that the checkpoint brings along, which runs with "
        "trust_remote_code=True only"
    )
    for options in ({}, {"model_impl": "transformers"}):
        with pytest.raises(
            (CheckpointError, UnsupportedError), match="trust_remote_code=True only"
        ):
            generate(remote[0], **options)
    assert not sys.remote_code_ran


def test_it_runs_where_it_is_trusted(remote):
    folder, model = remote
    check_parity(model, generate(folder, model_impl="transformers", trust_remote_code=True))
    assert sys.remote_code_ran


@pytest.mark.parametrize("trusted", [False, True])
def test_a_class_of_transformers_goes_before_it(remote, trusted):
    folder, model = remote
    rewrite(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    check_parity(model, generate(folder, model_impl="transformers", trust_remote_code=trusted))
    assert not sys.remote_code_ran
