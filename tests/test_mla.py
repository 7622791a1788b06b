"""Multi-head latent attention (contrib_models/deepseek), which has a KV kind and an attention
backend of its own: prefixes, swapping, ranks and stages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from deepseek_families import SIZE, V2, make_v2
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.attention import AttentionSpec
from toolkit_lm.events import RequestEvent
from toolkit_lm.kv import FullSpec
from toolkit_lm.plugin import hookimpl
from toolkit_lm_deepseek.backend import LatentBackend
from toolkit_lm_deepseek.spec import LatentSpec
from toolkit_lm_devkit import KVKindConformance, make_checkpoint, randomize

sys.path.insert(0, str(Path(__file__).parent / "plugins" / "threads"))

import toolkit_lm_threads as THREADS

VOCAB = 272


class TestLatentSpec(KVKindConformance):
    backend = LatentBackend
    spec = LatentSpec(block_size=16, size=SIZE, dtype="float32")
    variants = [
        LatentSpec(block_size=1, size=SIZE, dtype="float32"),
        LatentSpec(block_size=16, size=SIZE + 1, dtype="float32"),
        LatentSpec(block_size=16, size=SIZE, dtype="bfloat16"),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = make_v2(**V2["lite"])
    randomize(model)
    return make_checkpoint(tmp_path_factory.mktemp("mla"), model)


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
    engine = {"plugins": plugins, "dtype": "float32", "device": "cpu"}
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


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"window": 8}, "without window"),
        ({"dtype": "float64"}, "no product of float64"),
        ({"type": "cross"}, "no attention of type 'cross'"),
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
