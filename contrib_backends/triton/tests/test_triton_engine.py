"""Small models in a whole engine: on a GPU, or by Triton's interpreter, which `test_interpreter.py`
runs these tests with."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_devkit import make_checkpoint
from toolkit_lm_devkit.generation import generate, pool
from toolkit_lm_triton.device import interprets, refusal
from toolkit_lm_triton.fused import FusedDecoderLayer
from toolkit_lm_triton.low_rank import Added
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

DEVICE = "cpu" if interprets() else "cuda"
pytestmark = pytest.mark.skipif(
    refusal(DEVICE, "float32") is not None, reason=str(refusal(DEVICE, "float32"))
)
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(attention_bias=True, **SHAPE)),
    "qwen3 with a window": lambda: Qwen3ForCausalLM(
        Qwen3Config(use_sliding_window=True, sliding_window=20, max_window_layers=1, **SHAPE)
    ),
}
PROMPTS = [[5, 6, 7], list(range(9, 79)), [8], list(range(200, 220))]
"""The second has more keys than a program of the kernels takes at a time."""
PLAIN = {"attention_backend": "sdpa", "kernels": "torch"}
OURS = {"attention_backend": "triton", "kernels": "triton"}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request, tmp_path_factory):
    torch.manual_seed(0)
    return make_checkpoint(tmp_path_factory.mktemp("model"), MODELS[request.param]())


# Quantized weights and adapters run in the other by day.
@pytest.mark.parametrize(
    "model",
    ["qwen3 with a window", pytest.param("llama", marks=pytest.mark.nightly)],
    indirect=True,
)
def test_generation(monkeypatch, model) -> None:
    """Prompts in chunks, and several rows a step: the same tokens, by layers that rotate keys into
    the cache."""
    calls = []
    call = FusedDecoderLayer.__call__
    monkeypatch.setattr(
        FusedDecoderLayer,
        "__call__",
        lambda self, *given: calls.append(call(self, *given)) or calls[-1],
    )
    options = {
        "vocab_size": 300,
        "max_tokens": 4,
        "dtype": "float32",
        "device": DEVICE,
        "max_num_batched_tokens": 40,
        "max_num_seqs": 4,
    }
    expected = generate(model, PROMPTS, **options, **PLAIN)
    none_yet = not calls
    ours = generate(model, PROMPTS, **options, **OURS)
    assert none_yet and calls and all(done is not None for done in calls)
    assert ours.token_ids == expected.token_ids
    for one, other in zip(ours.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_kernels_without_the_attention_backend_and_the_other_way_round(model) -> None:
    options = {"vocab_size": 300, "max_tokens": 3, "dtype": "float32", "device": DEVICE}
    expected = generate(model, PROMPTS[:1], **options, **PLAIN)
    for chosen in (PLAIN | {"kernels": "triton"}, PLAIN | {"attention_backend": "triton"}):
        assert generate(model, PROMPTS[:1], **options, **chosen).token_ids == expected.token_ids


# Layers without a window are those of the kit.
@pytest.mark.parametrize(
    "model",
    ["qwen3 with a window", pytest.param("llama", marks=pytest.mark.nightly)],
    indirect=True,
)
def test_pooling(model) -> None:
    """Without a cache, and a prompt that its window does not hold."""
    prompts = [PROMPTS[0], PROMPTS[1][:36]]
    expected = pool(model, prompts, dtype="float32", device=DEVICE, **PLAIN)
    ours = pool(model, prompts, dtype="float32", device=DEVICE, **OURS)
    for one, other in zip(ours.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_quantized_weights_and_caches(model, monkeypatch, tmp_path) -> None:
    """The same tokens as by torch: products of 4 bits round nothing, and caches hold the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = {
        "vocab_size": 300,
        "max_tokens": 4,
        "dtype": "float32",
        "device": DEVICE,
        "quantization": "int4",
        # Its inputs would be rounded: it has 8 bits.
        "quantization_skip": ["lm_head"],
        "kv_cache_dtype": "int8",
    }
    expected = generate(model, PROMPTS[:2], **options, **PLAIN)
    ours = generate(model, PROMPTS[:2], **options, **OURS)
    assert ours.token_ids == expected.token_ids
    for one, other in zip(ours.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def make_adapter(folder, rank, targets):
    """A random adapter of the shapes of SHAPE."""
    widths = {"q_proj": (64, 96), "v_proj": (64, 48), "gate_proj": (64, 96), "down_proj": (96, 64)}
    torch.manual_seed(rank)
    tensors = {}
    for layer in range(2):
        for name in targets:
            inputs, outputs = widths[name]
            module = "self_attn" if name in ("q_proj", "v_proj") else "mlp"
            at = f"base_model.model.model.layers.{layer}.{module}.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, inputs)
            tensors[f"{at}.lora_B.weight"] = torch.randn(outputs, rank)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*targets]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_adapters(model, monkeypatch, tmp_path) -> None:
    """Adapters of several rows in one step, in layers that rotate keys into the cache."""
    front = pytest.importorskip("toolkit_lm_lora.front")
    calls = []
    to = Added.to
    monkeypatch.setattr(Added, "to", lambda self, *given: calls.append(1) or to(self, *given))
    first = make_adapter(tmp_path / "first", 3, ["q_proj", "v_proj", "down_proj"])
    second = make_adapter(tmp_path / "second", 20, ["gate_proj", "down_proj"])
    asked = [front.LoRARequest("first", 1, first), None, front.LoRARequest("second", 2, second)]
    found = []
    for kernels in (PLAIN, OURS):
        assert not calls
        with LLM(
            str(model),
            dtype="float32",
            device=DEVICE,
            skip_tokenizer_init=True,
            plugin_option={"lora": {"enabled": True}},
            **kernels,
        ) as llm:
            params = SamplingParams(max_tokens=3, temperature=0, logprobs=1, ignore_eos=True)
            prompts = [{"prompt_token_ids": PROMPTS[0]}] * 3
            done = llm.generate(prompts, params, lora_request=asked, use_tqdm=False)
        assert not any(output.error for output in done)
        found.append([output.outputs[0] for output in done])
    assert calls and len({str(one.token_ids) for one in found[1]}) > 1
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert abs(one.cumulative_logprob - other.cumulative_logprob) < 1e-3
