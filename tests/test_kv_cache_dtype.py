"""`kv_cache_dtype`: keys and values in int8 or fp8, with a scale per token and head."""

from __future__ import annotations

import re

import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm_devkit import make_checkpoint
from toolkit_lm_devkit.attention_step import round_trip
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache

BACKENDS = ("cpu", "sdpa")
VOCAB = 272
PROMPTS = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 41, 1)]
LOUD = SamplingParams(temperature=0, max_tokens=8, logprobs=VOCAB, ignore_eos=True)
OPTIONS = {"device": "cpu", "dtype": "float32", "max_logprobs": VOCAB, "num_kv_blocks": 32}


class RoundTrip(DynamicCache):
    """Keeps what a quantized cache gives back, in some layers."""

    def __init__(self, kind, layers=(0, 1), **options):
        super().__init__(**options)
        self.kind = kind
        self.quantized = layers

    def update(self, k, v, layer, *args, **kwargs):
        if layer in self.quantized:
            k, v = (round_trip(x, self.kind, 1.0) for x in (k, v))
        return super().update(k, v, layer, *args, **kwargs)


def generate(folder, **options):
    with LLM(str(folder), **OPTIONS | options) as llm:
        return llm.generate(PROMPTS, LOUD, use_tqdm=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_answers_are_those_of_the_stored_keys(make_llama, assert_parity, backend, kind):
    """In chunks, too. The model with exact keys answers otherwise."""
    folder, model = make_llama("kv-dtype", head_dim=32)
    outputs = generate(
        folder,
        attention_backend=backend,
        kv_cache_dtype=kind,
        max_num_batched_tokens=8,
        max_num_seqs=8,
    )

    def reference(tokens):
        return model(tokens, past_key_values=RoundTrip(kind, config=model.config))

    assert_parity(reference, outputs)
    with pytest.raises(AssertionError):
        assert_parity(model, outputs)


@pytest.mark.parametrize("skipped", [["1"], ["model.layers.1.*"]])
def test_layers_that_are_skipped_keep_what_they_are_given(make_llama, assert_parity, skipped):
    folder, model = make_llama("kv-dtype", head_dim=32)
    outputs = generate(folder, kv_cache_dtype="int8", kv_cache_dtype_skip_layers=skipped)

    def reference(tokens):
        return model(tokens, past_key_values=RoundTrip("int8", (0,), config=model.config))

    assert_parity(reference, outputs)


def test_a_wish_that_no_layer_can_meet_is_refused(make_llama):
    folder, _ = make_llama("kv-dtype", head_dim=32)
    reason = "kv_cache_dtype 'int8': LlamaForCausalLM has no layer.*skip_layers names all"
    with pytest.raises(UnsupportedError, match=reason):
        generate(folder, kv_cache_dtype="int8", kv_cache_dtype_skip_layers=["*"])


@pytest.mark.parametrize("pattern", ["2", "*.cross_attn", "model.layers.0"])
def test_a_pattern_that_names_no_layer_is_refused(make_llama, pattern):
    folder, _ = make_llama("kv-dtype", head_dim=32)
    reason = (
        f"kv_cache_dtype_skip_layers: {re.escape(repr(pattern))} names no layer. Layers with a "
        r"cache: model\.layers\.0\.self_attn\.attn \.\.\. model\.layers\.1\.self_attn\.attn\."
    )
    with pytest.raises(ConfigError, match=reason):
        generate(folder, kv_cache_dtype="int8", kv_cache_dtype_skip_layers=["0", pattern])


def test_beams_fork_a_quantized_cache(make_llama):
    """With blocks that forks share, and with blocks of one token, which they do not."""
    folder, _ = make_llama("kv-dtype", head_dim=32)
    found = []
    for backend, size in (("cpu", 16), ("sdpa", 16), ("sdpa", 1)):
        with LLM(
            str(folder),
            attention_backend=backend,
            kv_cache_dtype="int8",
            block_size=size,
            **OPTIONS | {"num_kv_blocks": 600 // size},
        ) as llm:
            beams = SamplingParams(
                use_beam_search=True, beam_width=3, max_tokens=9, ignore_eos=True
            )
            outputs = llm.generate(PROMPTS, beams, use_tqdm=False)
            found.append([[list(beam.token_ids) for beam in o.outputs] for o in outputs])
    assert found[0] == found[1] == found[2]


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=VOCAB,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=64,
        init_std=0.2,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    model = BartForConditionalGeneration(config).eval()
    return make_checkpoint(tmp_path_factory.mktemp("bart"), model)


def test_cross_attention_reads_a_quantized_cache(bart):
    """Both backends find the same, which exact keys do not give."""
    found = {}
    for backend in BACKENDS:
        for kind in ("int8", "auto"):
            options = OPTIONS | {"attention_backend": backend, "kv_cache_dtype": kind}
            with LLM(str(bart), **options) as llm:
                outputs = llm.generate(PROMPTS, LOUD, use_tqdm=False)
            found[backend, kind] = torch.tensor(
                [
                    [entries[token].logprob for token in range(VOCAB)]
                    for output in outputs
                    for entries in output.outputs[0].logprobs[:1]
                ]
            )
    difference = (found["cpu", "int8"] - found["sdpa", "int8"]).abs().max()
    assert difference <= 1e-4
    assert (found["cpu", "int8"] - found["cpu", "auto"]).abs().max() > 10 * difference
