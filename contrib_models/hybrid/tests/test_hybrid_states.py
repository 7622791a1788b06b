"""States in the whole engine: snapshots, forks, beams, preemption and rewinds give the tokens of a
plain run."""

from __future__ import annotations

import pytest
import torch
from hybrid_families import VARIANTS, VOCAB_SIZE, make_model
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.events import RequestEvent
from toolkit_lm.plugin import hookimpl
from toolkit_lm_devkit import KVKindConformance, make_checkpoint, randomize
from toolkit_lm_hybrid.mixer import RecurrentBackend
from toolkit_lm_hybrid.spec import RecurrentStateSpec

SIZE = 4
TAILS = [[*range(length, 2 * length)] for length in (29, 32, 33, 5, 4, 1)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=5, ignore_eos=True)
FORKS = SamplingParams(temperature=1, max_tokens=9, n=4, seed=4, ignore_eos=True)
BEAMS = SamplingParams(
    use_beam_search=True, n=2, beam_width=2, max_tokens=6, ignore_eos=True, temperature=0
)
CASES = {
    "chunks": {"max_num_batched_tokens": 9},
    "recompute": {"num_kv_blocks": 28, "preemption_mode": "recompute"},
    "swap": {"num_kv_blocks": 28, "preemption_mode": "swap", "swap_memory": "4MiB"},
}


class Preemptions:
    name = "preemptions"

    def __init__(self):
        self.count = 0

    @hookimpl
    def toolkit_event(self, event):
        self.count += isinstance(event, RequestEvent) and event.kind == "preempted"


FAMILIES = {
    "Qwen3_5ForCausalLM": {
        **VARIANTS["Qwen3_5ForCausalLM"]["dense"],
        "max_position_embeddings": 4096,
        # Heads of the sizes that kernels take.
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "RwkvForCausalLM": {
        **VARIANTS["RwkvForCausalLM"]["tied, not rescaled"],
        "context_length": 4096,
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    model = make_model(request.param, FAMILIES[request.param]).eval()
    randomize(model)
    return make_checkpoint(tmp_path_factory.mktemp(request.param), model)


def run(folder, params, prompts=TAILS, *, plugins=(), rounds=1, **options):
    """Tokens and log probabilities of each round, and the cached tokens."""
    options = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 96,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "block_size": SIZE,
        **options,
    }
    if options.get("drafter"):
        options["draft_budget"] = "all"
    with LLM(str(folder), plugins=[*plugins], **options) as llm:
        texts = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = [llm.generate(texts, params, use_tqdm=False) for _ in range(rounds)]
    assert not any(output.error for outputs in found for output in outputs)
    tokens = [
        [[one.token_ids for one in output.outputs] for output in outputs] for outputs in found
    ]
    logprobs = [
        [
            [{k: v.logprob for k, v in entry.items()} for entry in one.logprobs or ()]
            for output in outputs
            for one in output.outputs
        ]
        for outputs in found
    ]
    cached = [[output.num_cached_tokens for output in outputs] for outputs in found]
    return tokens, logprobs, cached


@pytest.mark.parametrize("options", [{}, {"drafter": "ngram"}, {"kernels": "torch"}], ids=str)
def test_warm_is_cold_bit_for_bit(folder, options):
    tokens, logprobs, cached = run(folder, GREEDY, rounds=2, max_num_seqs=1, **options)
    assert tokens[1] == tokens[0]
    assert logprobs[1] == logprobs[0]
    assert cached[1] == [(len(prompt) - 1) // SIZE * SIZE for prompt in TAILS]


@pytest.mark.parametrize("params", [GREEDY, FORKS, BEAMS], ids=["greedy", "n=4", "beams"])
def test_hits_chunks_and_preemption_change_no_token(folder, params):
    [plain], _, _ = run(folder, params, enable_prefix_caching=False)
    has_states_alone = folder.name.startswith("Rwkv")
    for options in CASES.values():
        if has_states_alone and params is BEAMS and "num_kv_blocks" in options:
            options = {**options, "num_kv_blocks": 5}
        counter = Preemptions()
        tokens, _, cached = run(folder, params, plugins=[counter], rounds=2, **options)
        assert tokens == [plain, plain], options
        assert any(cached[1]) or "num_kv_blocks" in options
        # So few blocks admit few groups of four, which then have room to grow. What has states
        # alone grows by its beams, and of fewer blocks.
        never = params is FORKS or (params is GREEDY and has_states_alone)
        assert counter.count or "num_kv_blocks" not in options or never


def test_drafts_change_no_token(folder):
    prompts = [
        [3 + (i * k) % period for i in range(length)]
        for k, period, length in ((1, 11, 24), (3, 7, 9), (5, 4, 40), (1, 3, 7))
    ]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain, _, _ = run(folder, params, prompts)
    for options in ({}, CASES["chunks"]):
        drafted, _, _ = run(folder, params, prompts, drafter="ngram", **options)
        assert drafted == plain


@pytest.mark.parametrize("count", [3, pytest.param(65, marks=pytest.mark.nightly)])
def test_who_shares_a_long_opening_begins_from_a_snapshot(folder, count):
    """All prompts but the first hit, at 1,500 shared and 700 own tokens, with memory for few
    snapshots."""
    generator = torch.Generator().manual_seed(5)
    opening, *own = torch.randint(3, VOCAB_SIZE, (count + 1, 1500), generator=generator).tolist()
    prompts = [opening + tail[:700] for tail in own]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    options = {
        "max_model_len": 2304,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 2304,
        "block_size": 16,
        "kv_cache_memory": "4MiB",
    }
    _, _, [cached] = run(folder, params, prompts, **options)
    assert cached[0] == 0
    assert min(cached[1:]) >= 1024


class TestRecurrentState(KVKindConformance):
    backend = RecurrentBackend
    spec = RecurrentStateSpec(block_size=4096, shapes=((3, 8), (2, 4, 4)))
    variants = [
        RecurrentStateSpec(block_size=64, shapes=((3, 8), (2, 4, 4))),
        RecurrentStateSpec(block_size=4096, shapes=((3, 9),)),
        RecurrentStateSpec(block_size=4096, shapes=((3, 8), (2, 4, 4)), snapshots=4),
        RecurrentStateSpec(block_size=4096, shapes=((3, 8), (2, 4, 4)), snapshots=4, every=32),
        RecurrentStateSpec(block_size=4096, shapes=((3, 8), (2, 4, 4)), rewinds=3),
    ]
