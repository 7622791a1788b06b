"""Multi-head latent attention, by a third party's distribution (tests/plugins/mla): a KV kind and
an attention backend of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import transformers
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.attention import AttentionSpec
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.events import RequestEvent
from toolkit_lm.kv import FullSpec
from toolkit_lm.plugin import hookimpl
from toolkit_lm_devkit import KVKindConformance, TransformersConformance, make_checkpoint

sys.path.insert(0, str(Path(__file__).parent / "plugins" / "mla"))
sys.path.insert(0, str(Path(__file__).parent / "plugins" / "threads"))

import toolkit_lm_mla
import toolkit_lm_threads as THREADS
from toolkit_lm_mla.backend import LatentBackend
from toolkit_lm_mla.spec import LatentSpec

VOCAB = 272
SIZE = 24
"""Numbers that are kept of a token: kv_lora_rank + qk_rope_head_dim."""


def make_model(**fields):
    config = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "num_attention_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "max_position_embeddings": 128,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**config | fields))


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}


class TestDeepseekV2(TransformersConformance):
    """Parity with transformers: whole prompts, chunks, preemptions, ranks, and without a cache."""

    plugins = [toolkit_lm_mla]
    tensor_parallel_sizes = (2,)
    variants = {
        "default": {},
        "query rank": {"q_lora_rank": 14, "attention_bias": True},
        "sharpened": {"rope_parameters": YARN},
    }

    def make_hf_model(self, **variant):
        return make_model(**variant)


class TestLatentSpec(KVKindConformance):
    plugins = [toolkit_lm_mla]
    backend = LatentBackend
    spec = LatentSpec(block_size=16, size=SIZE, dtype="float32")
    variants = [
        LatentSpec(block_size=1, size=SIZE, dtype="float32"),
        LatentSpec(block_size=16, size=SIZE + 1, dtype="float32"),
        LatentSpec(block_size=16, size=SIZE, dtype="bfloat16"),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mla")
    TestDeepseekV2().make_checkpoint(made)
    return made


PROMPTS = [[(7 * i + length) % 271 for i in range(length)] for length in (30, 5, 17)]


class Preemptions:
    name = "preemptions"

    def __init__(self) -> None:
        self.count = 0

    @hookimpl
    def toolkit_event(self, event) -> None:
        self.count += isinstance(event, RequestEvent) and event.kind == "preempted"


def run(folder, prompts, *plugins, **options):
    """Token ids, log probabilities and cached tokens of each prompt."""
    defaults = {"block_size": 4, "max_num_seqs": 1, "max_model_len": 64, "max_logprobs": VOCAB}
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=VOCAB, ignore_eos=True)
    engine = {"plugins": [toolkit_lm_mla, *plugins], "dtype": "float32", "device": "cpu"}
    with LLM(str(folder), **engine, **defaults | options) as llm:
        [group] = llm.engine.client.core.kv_cache.groups
        assert group.spec == LatentSpec(block_size=4, size=SIZE, dtype="float32")
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
    found = [
        (
            output.outputs[0].token_ids,
            [{k: v.logprob for k, v in each.items()} for each in output.outputs[0].logprobs],
        )
        for output in outputs
    ]
    return found, [output.num_cached_tokens for output in outputs]


def assert_close(found, expected):
    for (tokens, logprobs), plain in zip(found, expected, strict=True):
        assert tokens == plain[0]
        for one, other in zip(logprobs, plain[1], strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def test_a_cached_prefix_gives_what_computing_it_gives(folder):
    cold, none = run(folder, PROMPTS, enable_prefix_caching=False)
    found, cached = run(folder, PROMPTS * 2)
    assert cached == [0, 0, 0, 28, 4, 16]
    assert not any(none)
    assert_close(found, cold * 2)


def test_latents_are_swapped(folder):
    prompts = [[(k * i) % 271 for i in range(7)] for k in range(2, 10)]
    together = {"max_num_seqs": 8, "enable_prefix_caching": False}
    swapped = {"num_kv_blocks": 17, "preemption_mode": "swap", "swap_memory": "1MiB"}
    plain, _ = run(folder, prompts, **together)
    counter = Preemptions()
    found, _ = run(folder, prompts, counter, **together, **swapped)
    assert counter.count > 0
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]


def test_two_ranks_keep_the_whole_latents_each(folder):
    """Heads are divided. The cache is not: each rank's pages have the size of one rank's."""
    plain, _ = run(folder, PROMPTS)
    ranks = {"executor": "threads", "tensor_parallel_size": 2, "max_num_batched_tokens": 11}
    found, cached = run(folder, PROMPTS * 2, THREADS, **ranks)
    assert cached == [0, 0, 0, 28, 4, 16]
    assert_close(found, plain * 2)
    found, _ = run(folder, PROMPTS, THREADS, **ranks, max_num_seqs=3, pipeline_parallel_size=2)
    assert_close(found, plain)


def test_layers_with_experts_are_refused(tmp_path):
    make_checkpoint(tmp_path, make_model(first_k_dense_replace=1, moe_intermediate_size=8))
    with pytest.raises(UnsupportedError, match=r"'first_k_dense_replace' \(1\)"):
        run(tmp_path, [])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"window": 8}, "without window"),
        ({"dtype": "float64"}, "no product of float64"),
        (
            {"kv_cache": FullSpec(block_size=4, num_kv_heads=1, head_size=SIZE, dtype="float32")},
            "only for layers that keep latent vectors",
        ),
    ],
)
def test_the_backend_refuses_what_it_cannot_run(fields, reason):
    layer = {
        "layer": "attn",
        "type": "decoder",
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_size": SIZE,
        "dtype": "float32",
        "device": "cpu",
        "kv_cache": LatentSpec(block_size=4, size=SIZE, dtype="float32"),
    }
    found = LatentBackend.refuses(AttentionSpec(**layer | fields))
    assert found is None if reason is None else reason in found
