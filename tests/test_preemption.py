"""Preemption through the whole engine: by recomputing, by swapping, and by what costs less. Results
are the same."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm import LLM, SamplingParams

# It holds one sequence of max_model_len, and not all eight.
TIGHT = {
    "block_size": 4,
    "max_model_len": 112,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
    "max_logprobs": 272,
}
LOUD = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=272)
LENGTHS = (5, 17, 40, 3, 64, 33, 1, 21)
MODES = {
    "recompute": {"preemption_mode": "recompute", "swap_memory": "8MiB"},
    "swap": {"preemption_mode": "swap", "swap_memory": "8MiB"},
    "auto": {"preemption_mode": "auto", "swap_memory": "8MiB"},
    "swap to a small pool": {"preemption_mode": "swap", "swap_memory": "20KiB"},
}


def prompts_of(vocab_size: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {"prompt_token_ids": torch.randint(3, vocab_size, (n,), generator=generator).tolist()}
        for n in LENGTHS
    ]


@pytest.fixture(params=["full", "windowed"])
def tight(request, make_llama, make_windowed):
    """(options, transformers model)"""
    folder, model = make_llama("engine") if request.param == "full" else make_windowed()
    return TIGHT | {
        "model": str(folder),
        "num_kv_blocks": 30 if request.param == "full" else 60,
    }, model


@pytest.mark.parametrize(
    "mode, caching, overlap",
    [
        ("recompute", False, True),
        ("recompute", True, False),
        ("swap", False, False),
        ("swap", True, True),
        ("auto", True, True),
        ("swap to a small pool", False, True),
        ("swap to a small pool", True, False),
    ],
)
def test_results_are_the_same(tight, assert_parity, watch, mode, caching, overlap):
    options, model = tight
    with LLM(
        plugins=[watch], enable_prefix_caching=caching, overlap=overlap, **MODES[mode], **options
    ) as llm:
        outputs = llm.generate(prompts_of(272), LOUD, use_tqdm=False)
    assert_parity(model, outputs)
    assert watch.count("preempted") > 0
    assert (watch.most("num_used_host_blocks") > 0) >= (mode == "swap")
    assert (watch.most("num_used_host_blocks") > 0) <= (
        mode in ("swap", "auto", "swap to a small pool")
    )
    assert (watch.last("num_used_blocks"), watch.last("num_used_host_blocks")) == (0, 0)


def test_swapping_computes_nothing_again(tight, watch):
    options, _ = tight
    with LLM(plugins=[watch], enable_prefix_caching=False, **MODES["swap"], **options) as llm:
        llm.generate(prompts_of(272), LOUD.replace(logprobs=None), use_tqdm=False)
    assert watch.count("preempted") > 0
    # The last token of each is drawn, and never computed.
    assert watch.num_tokens == sum(LENGTHS) + len(LENGTHS) * (LOUD.max_tokens - 1)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_several_sequences_are_preempted_as_one(tight, assert_parity, watch, mode):
    options, model = tight
    with LLM(plugins=[watch], **MODES[mode], **options) as llm:
        prompts = [prompt for prompt in prompts_of(272) if len(prompt["prompt_token_ids"]) < 35]
        outputs = llm.generate(prompts, LOUD.replace(n=2), use_tqdm=False)
        assert watch.count("preempted") > 0
        seeded = SamplingParams(temperature=0.9, n=2, seed=4, max_tokens=20, ignore_eos=True)
        together = llm.generate(prompts, seeded, use_tqdm=False)
        alone = [llm.generate(prompt, seeded, use_tqdm=False)[0] for prompt in prompts]
    assert_parity(model, outputs)
    for ours, theirs in zip(together, alone, strict=True):
        assert [c.token_ids for c in ours.outputs] == [c.token_ids for c in theirs.outputs]
    assert (watch.last("num_used_blocks"), watch.last("num_used_host_blocks")) == (0, 0)


def test_an_abort_frees_host_blocks(tight, watch):
    options, _ = tight
    with LLM(plugins=[watch], **MODES["swap"], **options) as llm:
        engine = llm.engine
        for i, prompt in enumerate(prompts_of(272)):
            engine.add_request(f"{i}", prompt, LOUD.replace(logprobs=None))
        while not any(request.swapped for request in engine.client.core.scheduler.roster.waiting):
            engine.step()
        engine.abort([f"{i}" for i in range(len(LENGTHS))])
        engine.advance(timeout=0)
    assert (watch.last("num_used_blocks"), watch.last("num_used_host_blocks")) == (0, 0)
