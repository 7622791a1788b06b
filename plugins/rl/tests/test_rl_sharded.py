"""States of ranks in files: an engine of them computes the same bits."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_rl_server import BODY
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import CheckpointError, ToolkitError, UnsupportedError
from toolkit_lm_devkit import randomize
from toolkit_lm_rl.control import Control
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

ENGINE = {
    "renderer": "tokens",
    "dtype": "float32",
    "max_model_len": 64,
    "num_kv_blocks": 32,
    "block_size": 16,
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FORMATS = ("sharded_state", "auto")
MODELS = {
    "plain": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)),
    "tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "experts": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16
        )
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make().eval()
        randomize(model)
        model.save_pretrained(folder / name)
    return folder


def figures(llm: LLM) -> list:
    """Tokens and all log probabilities of an answer, exactly."""
    [output] = llm.generate([{"prompt_token_ids": BODY["prompt"]}], PARAMS)
    tables = output.outputs[0].logprobs
    return [[(token, entry.logprob) for token, entry in table.items()] for table in tables]


def saved(checkpoint, folder, max_size=None, **options) -> list:
    """Saves what each rank has into a folder, and returns the engine's figures."""
    with LLM(str(checkpoint), **ENGINE, **options) as llm:
        Control(llm).save_sharded_state(str(folder), max_size)
        found = figures(llm)
    shutil.copy(checkpoint / "config.json", folder)
    return found


@pytest.mark.parametrize(
    ("name", "options", "formats"),
    [
        ("plain", {}, FORMATS),
        ("tied", {"kernels": "cpu"}, FORMATS),
        ("plain", {"tensor_parallel_size": 2}, FORMATS[:1]),
        ("tied", {"pipeline_parallel_size": 2}, FORMATS[1:]),
        pytest.param("experts", {"tensor_parallel_size": 2}, FORMATS, marks=pytest.mark.nightly),
        ("experts", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, FORMATS[1:]),
        ("plain", {"model_impl": "transformers"}, FORMATS),
    ],
    ids=str,
)
def test_an_engine_of_states_computes_the_same_bits(checkpoints, tmp_path, name, options, formats):
    """Ranks are processes, whose start is long: each case of them is loaded in one way."""
    expected = saved(checkpoints / name, tmp_path, 20_000, **options)
    ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    for rank in range(ranks):
        assert len(list(tmp_path.glob(f"model-rank-{rank}-part-*.safetensors"))) > 1
    assert not list(tmp_path.glob(f"model-rank-{ranks}-*"))
    for load_format in formats:
        with LLM(str(tmp_path), **ENGINE, **options, load_format=load_format) as llm:
            assert figures(llm) == expected


def test_weights_of_a_trainer_are_saved_too(checkpoints, tmp_path):
    with LLM(str(checkpoints / "plain"), **ENGINE) as llm:
        before = figures(llm)
        control = Control(llm)
        control.load_weights([("model.norm.weight", torch.full((64,), 0.3))])
        expected = figures(llm)
        assert expected != before
        control.save_sharded_state(str(tmp_path))
    shutil.copy(checkpoints / "plain/config.json", tmp_path)
    with LLM(str(tmp_path), **ENGINE) as llm:
        assert figures(llm) == expected
        # Its own tensors are no checkpoint's, so that none of them can be replaced.
        with pytest.raises(CheckpointError, match="no whole tensors"):
            Control(llm).load_weights([("model.norm.weight", torch.zeros(64))])
        assert figures(llm) == expected


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tensor_parallel_size": 2}, "saved with tensor_parallel_size 1, and the engine has 2"),
        ({"dtype": "bfloat16"}, "saved with dtype 'float32', and the engine has 'bfloat16'"),
    ],
)
def test_other_engines_are_refused(checkpoints, tmp_path, options, text):
    saved(checkpoints / "plain", tmp_path)
    with pytest.raises(ToolkitError, match=text), LLM(str(tmp_path), **{**ENGINE, **options}):
        pass


def test_files_that_do_not_fit_are_refused(checkpoints, tmp_path):
    saved(checkpoints / "plain", tmp_path)
    [path] = tmp_path.glob("model-rank-0-*")
    tensors = load_file(path)
    name = "model.norm.weight"
    weight = tensors[name]
    for changed, text in (
        ({name: weight[:3].clone()}, f"{name} has the shape"),
        ({name: weight.half()}, f"{name} has the shape"),
        ({"other": weight.clone()}, "has no 'other'"),
        (None, f"{name} of rank 0"),
    ):
        made = {k: v for k, v in tensors.items() if k != name} if changed is None else tensors
        save_file({**made, **(changed or {})}, path)
        with pytest.raises(CheckpointError, match=text):
            LLM(str(tmp_path), **ENGINE)
    info = json.loads((tmp_path / "sharded_state.json").read_text())
    (tmp_path / "sharded_state.json").write_text(json.dumps({**info, "format": 2}))
    with pytest.raises(CheckpointError, match="another format"):
        LLM(str(tmp_path), **ENGINE)
    (tmp_path / "sharded_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"sharded_state\.json cannot be read"):
        LLM(str(tmp_path), **ENGINE, load_format="sharded_state")


def test_quantized_weights_are_refused(checkpoints, tmp_path):
    with (
        LLM(str(checkpoints / "plain"), **ENGINE, quantization="int8") as llm,
        pytest.raises(UnsupportedError, match="no quantized weights"),
    ):
        Control(llm).save_sharded_state(str(tmp_path))
    assert not list(tmp_path.iterdir())
