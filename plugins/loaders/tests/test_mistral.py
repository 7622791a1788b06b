"""Mistral's own layout: the same tokens as transformers' files, of which it is written."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import CheckpointError
from toolkit_lm_loaders.mistral import MistralLoader

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.4,
    "max_position_embeddings": 128,
}
PARAMS = {
    "dim": 64,
    "n_layers": 2,
    "head_dim": 32,
    "hidden_dim": 96,
    "n_heads": 4,
    "n_kv_heads": 2,
    "norm_eps": 1e-5,
    "vocab_size": 320,
    "rope_theta": 500.0,
    "max_seq_len": 128,
    "use_biases": False,
}
FAMILIES = {
    "mistral": ("MistralConfig", {"sliding_window": 16}, {"sliding_window": 16}),
    "tied": (
        "MistralConfig",
        {"sliding_window": None, "tie_word_embeddings": True},
        {"tied_embeddings": True},
    ),
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"moe": {"num_experts": 4, "num_experts_per_tok": 2}},
    ),
}
WORDS = {
    "model.embed_tokens": "tok_embeddings",
    "model.layers": "layers",
    "model.norm": "norm",
    "lm_head": "output",
    "self_attn": "attention",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe": "feed_forward",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    **{f"{letter}_proj": f"w{letter}" for letter in "qkvo"},
}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def mistral_name(name: str) -> str:
    return re.sub(
        r"\b(" + "|".join(map(re.escape, WORDS)) + r")\b", lambda match: WORDS[match[1]], name
    )


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(name: str, tmp_path, shards: int = 1):
    """A checkpoint in both layouts."""
    kind, more, params = FAMILIES[name]
    config = getattr(transformers, kind)(
        **SHAPE, **more, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    hf = tmp_path / "hf"
    own = tmp_path / "own"
    model.save_pretrained(hf)
    own.mkdir()
    tensors = {}
    for tensor_name, tensor in load_file(hf / "model.safetensors").items():
        if match := re.search(r"\.([qk])_proj", tensor_name):
            heads = 4 if match[1] == "q" else 2
            # A rotation turns neighbours there, and here numbers half a head apart.
            split = tensor.view(heads, 2, 16, 64)
            tensor = torch.stack([split[:, 0], split[:, 1]], dim=2).reshape(tensor.shape)
        tensors[mistral_name(tensor_name)] = tensor.contiguous()
    names = sorted(tensors)
    for index in range(shards):
        file = (
            "consolidated.safetensors"
            if shards == 1
            else f"consolidated-{index + 1:05}-of-{shards:05}.safetensors"
        )
        save_file({name: tensors[name] for name in names[index::shards]}, own / file)
    (own / "params.json").write_text(json.dumps(PARAMS | params))
    return hf, own


def answers(folder, **options) -> list[list[int]]:
    prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (3, 30)]
    options = {"renderer": "tokens", "num_kv_blocks": 32, "max_model_len": 96, **options}
    with LLM(str(folder), **options) as llm:
        return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("name", FAMILIES)
def test_same_tokens(name, tmp_path):
    hf, own = write(name, tmp_path, shards=2 if name == "mixtral" else 1)
    expected = answers(hf)
    assert len({*expected[0], *expected[1]}) > 8
    assert answers(own) == answers(own, load_format="mistral") == expected
    assert answers(own, tensor_parallel_size=2) == answers(hf, tensor_parallel_size=2)


def test_a_folder_of_both_layouts(tmp_path):
    hf, own = write("mistral", tmp_path)
    for path in own.iterdir():
        (hf / path.name).write_bytes(path.read_bytes())
    expected = answers(hf)
    (hf / "model.safetensors").unlink()
    assert answers(hf) == answers(hf, load_format="mistral") == expected
    params = json.loads((hf / "params.json").read_text())
    (hf / "params.json").write_text(json.dumps(params | {"rope_theta": 7.0}))
    with pytest.raises(CheckpointError, match=r"rope_theta is 500\.0, and 7\.0 by params\.json"):
        answers(hf, load_format="mistral")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"vision_encoder": {"hidden_size": 8}}, "vision_encoder lacks intermediate_size"),
        ({"audio_encoder": {"hidden_size": 8}}, "audio_encoder is"),
        ({"yarn": {"factor": 4}}, "yarn is"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "quantization is"),
        (
            {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1}},
            "moe must",
        ),
        ({"moe": [4]}, "moe must"),
    ],
)
def test_other_models_are_refused_by_key(params, message, tmp_path):
    _, own = write("mistral", tmp_path)
    (own / "params.json").write_text(json.dumps(PARAMS | params))
    with pytest.raises(CheckpointError, match=message):
        answers(own)


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"dim": 4})])
def test_broken_params(text, tmp_path):
    (tmp_path / "params.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"params\.json"):
        MistralLoader(tmp_path)


def test_missing_files(tmp_path):
    _, own = write("mistral", tmp_path, shards=2)
    (own / "consolidated-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks consolidated-00002-of-00002"):
        answers(own)
    (own / "params.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no params\.json"):
        answers(own)


def test_unknown_tensors(tmp_path):
    _, own = write("mistral", tmp_path)
    save_file({"adapter.weight": torch.zeros(2, 2)}, own / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"named 'adapter\.weight'"):
        answers(own)
