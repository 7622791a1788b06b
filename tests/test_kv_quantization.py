"""A quantized KV cache: the quantization says how each layer keeps keys and values, the checkpoint
holds their scales, and backends that cannot read the cache refuse it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.model import Quantization
from toolkit_lm.plugin import hookimpl
from toolkit_lm_sdpa.backend import SdpaBackend
from transformers import DynamicCache

FP8 = torch.float8_e4m3fn
SCALES = {"k": 0.01, "v": 0.02}
PROMPTS = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 21, 1)]


class Fp8Cache(Quantization):
    """It leaves weights as they are."""

    seen: list[str] = []

    def method(self, spec):
        return None

    dtype = "float8_e4m3fn"

    def kv_cache(self, spec, prefix):
        self.seen.append(prefix)
        return replace(spec, dtype=self.dtype, scales="layer")


def stored(x, scale):
    return (x / scale).to(FP8)


class Fp8Backend(SdpaBackend):
    """sdpa on the whole cache, made floats in each layer."""

    @classmethod
    def refuses(cls, spec):
        cache = spec.kv_cache
        if cache is None or cache.scales != "layer":
            return "only for a cache with scales"
        return SdpaBackend.refuses(
            replace(spec, kv_cache=replace(cache, dtype=spec.dtype, scales="none"))
        )

    def write_kv(self, call):
        k, v = (stored(x, scale) for x, scale in self.pairs(call))
        # index_copy_ has no kernel for 8-bit floats: they are copied as bytes.
        (cache,) = call.kv_cache
        as_bytes = {"kv_cache": (cache.view(torch.uint8),)}
        super().write_kv(replace(call, k=k.view(torch.uint8), v=v.view(torch.uint8), **as_bytes))

    def forward(self, call):
        (cache,) = call.kv_cache
        scales = torch.stack([call.layer.k_scale, call.layer.v_scale]).view(2, 1, 1, 1)
        kept = {"kv_cache": ((cache.float() * scales).to(call.q.dtype),)}
        if call.k is not None:
            # A step's new values are seen as they are stored, so that chunks change nothing.
            k, v = ((stored(x, scale).float() * scale).to(x.dtype) for x, scale in self.pairs(call))
            kept |= {"k": k, "v": v}
        super().forward(replace(call, **kept))

    def pairs(self, call):
        return (call.k, call.layer.k_scale), (call.v, call.layer.v_scale)


class Fp8:
    name = "fp8"

    @hookimpl
    def toolkit_register_quantization(self, quantization):
        quantization.add("fp8cache", f"{__name__}:Fp8Cache")

    @hookimpl
    def toolkit_register_attention_backends(self, backends):
        backends.add("fp8", f"{__name__}:Fp8Backend", priority=0)


class NoBackend(Fp8):
    @hookimpl
    def toolkit_register_attention_backends(self, backends):
        pass


class RoundTrip(DynamicCache):
    """Keeps what an 8-bit cache would give back."""

    def update(self, k, v, layer, *args, **kwargs):
        k, v = (
            stored(x, SCALES[name] * (layer + 1)).float() * SCALES[name] * (layer + 1)
            for name, x in (("k", k), ("v", v))
        )
        return super().update(k, v, layer, *args, **kwargs)


def write(make_llama, tmp_path, name="self_attn.{0}_scale", shape=(1,), layers=(0, 1)):
    folder, model = make_llama("kv8")
    folder = shutil.copytree(folder, tmp_path / "kv8")
    weights = load_file(folder / "model.safetensors")
    for layer in layers:
        for which, scale in SCALES.items():
            key = f"model.layers.{layer}.{name.format(which)}"
            weights[key] = torch.full(shape, scale * (layer + 1))
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8cache"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


def run(folder, plugin=Fp8, **options):
    options = {"device": "cpu", "dtype": "float32", "max_logprobs": 272, "num_kv_blocks": 32} | (
        options
    )
    with LLM(str(folder), plugins=[plugin()], **options) as llm:
        return llm.generate(
            PROMPTS,
            SamplingParams(temperature=0, max_tokens=8, logprobs=272, ignore_eos=True),
            use_tqdm=False,
        )


@pytest.mark.parametrize(
    ("name", "shape"), [("self_attn.{0}_scale", (1,)), ("self_attn.{0}_proj.{0}_scale", ())]
)
def test_the_cache_is_kept_with_the_checkpoints_scales(
    make_llama, tmp_path, assert_parity, name, shape
):
    folder, model = write(make_llama, tmp_path, name, shape)
    Fp8Cache.seen.clear()
    outputs = run(folder, max_num_batched_tokens=8, max_num_seqs=8)
    assert Fp8Cache.seen == [f"model.layers.{layer}.self_attn.attn" for layer in (0, 1)]

    def reference(tokens):
        return model(tokens, past_key_values=RoundTrip(config=model.config))

    assert_parity(reference, outputs)
    with pytest.raises(AssertionError):
        assert_parity(model, outputs)


def test_backends_that_cannot_read_the_cache_say_why(make_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(Fp8Cache, "dtype", "float8_e5m2")
    folder, _ = write(make_llama, tmp_path)
    reason = (
        r"sdpa.*no kernel for a cache in float8_e5m2 with scales for each layer, only for "
        "float32, float8_e4m3fn, int8"
    )
    with pytest.raises(UnsupportedError, match=reason):
        run(folder, NoBackend)
    with pytest.raises(UnsupportedError, match=r"(?s)no kernel for a cache in float8.*fp8"):
        run(folder, attention_backend="sdpa")


def test_scales_that_are_missing_or_more_than_one_are_named(make_llama, tmp_path):
    folder, _ = write(make_llama, tmp_path, layers=(0,))
    missing = r"2 missing: .*1\.self_attn\.attn\.k_scale, .*1\.self_attn\.attn\.v_scale"
    with pytest.raises(CheckpointError, match=missing):
        run(folder)
    folder, _ = write(make_llama, tmp_path / "heads", shape=(2,))
    with pytest.raises(CheckpointError, match=r"has shape \[2\], and one scale is read"):
        run(folder)
