"""Prefix caching through the whole engine: what is found, what is computed, and that results are
the same."""

from __future__ import annotations

import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.outputs import RequestOutput

SIZE = 4
OPTIONS = {
    "num_kv_blocks": 256,
    "block_size": SIZE,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_logprobs": 272,
}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LOUD = GREEDY.replace(logprobs=272)
COMMON = [(37 * i) % 250 + 16 for i in range(41)]
PROMPTS = [
    COMMON[:k] + [100 + k, 90, 80 + k][:tail]
    for k, tail in [(41, 0), (40, 2), (33, 3), (41, 3), (16, 1), (2, 1), (24, 0)]
]


def full_blocks(num_tokens: int) -> int:
    return num_tokens // SIZE * SIZE


def generate(
    llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def run(
    llm: LLM, request_id: str, prompt: list[int], params: SamplingParams = GREEDY, **options
) -> RequestOutput:
    llm.engine.add_request(request_id, {"prompt_token_ids": prompt}, params, **options)
    while llm.engine.has_unfinished_requests():
        outputs = llm.engine.step()
    return outputs[-1]


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


@pytest.fixture(params=["full", "windowed"])
def checkpoint(request, make_llama, make_windowed):
    return make_llama("engine") if request.param == "full" else make_windowed()


@pytest.fixture
def llm(make_llama, watch):
    with LLM(str(make_llama("engine")[0]), plugins=[watch], **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("overlap", [False, True])
def test_hits_change_nothing(checkpoint, assert_parity, watch, overlap):
    folder, model = checkpoint
    with LLM(str(folder), plugins=[watch], overlap=overlap, **OPTIONS) as llm:
        cold = generate(llm, PROMPTS, LOUD)
        computed = watch.num_tokens
        warm = generate(llm, PROMPTS, LOUD)
        assert watch.num_tokens - computed < computed
        alone = [generate(llm, [prompt], LOUD)[0] for prompt in PROMPTS]
    for outputs in (cold, warm, alone):
        assert_parity(model, outputs)
    assert all(o.num_cached_tokens > 0 for o in warm if len(o.prompt_token_ids) > SIZE)
    assert all(o.num_cached_tokens < len(o.prompt_token_ids) for o in cold + warm + alone)


def test_all_full_blocks_but_the_last_token_are_found(llm):
    generate(llm, PROMPTS)
    assert [o.num_cached_tokens for o in generate(llm, PROMPTS)] == [
        full_blocks(len(p) - 1) for p in PROMPTS
    ]


def test_requests_admitted_together_share_what_is_still_being_computed(llm, watch):
    prompts = [[*COMMON[:40], tail, tail] for tail in (30, 31, 32, 33)]
    outputs = generate(llm, prompts, GREEDY.replace(max_tokens=1))
    assert [o.num_cached_tokens for o in outputs] == [0, 40, 40, 40]
    assert watch.num_tokens == 40 + 4 * 2


def test_off_computes_all(make_llama, watch):
    with LLM(
        str(make_llama("engine")[0]), plugins=[watch], enable_prefix_caching=False, **OPTIONS
    ) as llm:
        outputs = [
            *generate(llm, [COMMON] * 2, GREEDY.replace(max_tokens=1)),
            *generate(llm, [COMMON], GREEDY.replace(max_tokens=1)),
        ]
    assert [o.num_cached_tokens for o in outputs] == [0, 0, 0]
    assert watch.num_tokens == 3 * len(COMMON)


def test_salts_separate(llm):
    found = [
        run(llm, f"{i}", COMMON, cache_salt=salt).num_cached_tokens
        for i, salt in enumerate(["a", "b", None, "a", "b", None])
    ]
    assert found == [0, 0, 0, 40, 40, 40]


def test_reset(llm, watch):
    generate(llm, [COMMON])
    llm.reset_prefix_cache()
    assert generate(llm, [COMMON])[0].num_cached_tokens == 0
    # In the middle of a request, too.
    llm.engine.add_request("r", {"prompt_token_ids": COMMON}, GREEDY)
    llm.engine.step()
    llm.reset_prefix_cache()
    while llm.engine.has_unfinished_requests():
        (output,) = llm.engine.step()
    assert tokens_of(output) == tokens_of(generate(llm, [COMMON])[0])


def test_the_least_recently_used_goes_first(make_llama):
    first, second, third = ([start, *COMMON[:38]] for start in (20, 21, 22))
    short = GREEDY.replace(max_tokens=1)
    # Each takes ten blocks, nine of which are full: two of them fit, and not a third.
    with LLM(
        str(make_llama("engine")[0]), **OPTIONS | {"num_kv_blocks": 22, "max_model_len": 64}
    ) as llm:
        for prompt in (first, second, first, third):
            generate(llm, [prompt], short)
        assert generate(llm, [first], short)[0].num_cached_tokens == 36
        assert generate(llm, [second], short)[0].num_cached_tokens < 36


def test_the_next_turn_finds_what_was_generated(llm, make_llama, assert_parity):
    (output,) = generate(llm, [COMMON[:7]], GREEDY.replace(max_tokens=22))
    history = [*COMMON[:7], *output.outputs[0].token_ids]
    # The last token was drawn, and never computed.
    assert run(llm, "turn", [*history, 60, 61]).num_cached_tokens == full_blocks(len(history) - 1)
    assert_parity(make_llama("engine")[1], [run(llm, "again", [*history, 60, 61], LOUD)])


def test_prompt_logprobs_are_computed_and_not_found(llm, watch):
    params = GREEDY.replace(prompt_logprobs=2, max_tokens=3)
    cold = run(llm, "cold", COMMON, params)
    computed = watch.num_tokens
    warm = run(llm, "warm", COMMON, params)
    assert watch.num_tokens == 2 * computed
    assert warm.num_cached_tokens == 0
    assert len(warm.prompt_logprobs) == len(COMMON)
    for ours, theirs in zip(cold.prompt_logprobs[1:], warm.prompt_logprobs[1:], strict=True):
        assert {t: e.logprob for t, e in ours.items()} == pytest.approx(
            {t: e.logprob for t, e in theirs.items()}, abs=1e-4
        )
    # Others find what it has computed.
    assert run(llm, "other", COMMON).num_cached_tokens == 40


@pytest.mark.parametrize("roomy", [True, False])
def test_several_sequences_of_a_cached_prompt(checkpoint, assert_parity, watch, roomy):
    """With few blocks they preempt one another, and find what they themselves have computed."""
    folder, model = checkpoint
    few = 78 if getattr(model.config, "sliding_window", None) else 26
    num_blocks = 256 if roomy else few
    options = OPTIONS | {"num_kv_blocks": num_blocks, "max_model_len": 100}
    with LLM(str(folder), plugins=[watch], **options) as llm:
        for _ in range(2):
            outputs = generate(
                llm, [COMMON[:30], COMMON[:22], COMMON[:25]], LOUD.replace(n=2, max_tokens=24)
            )
            assert_parity(model, outputs)
    assert outputs[0].num_cached_tokens > 0
    assert bool(watch.count("preempted")) != roomy


def test_seeded_draws_are_the_same_from_the_cache(llm):
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=12, ignore_eos=True)
    assert tokens_of(run(llm, "cold", COMMON, params)) == tokens_of(
        run(llm, "warm", COMMON, params)
    )


def test_nothing_stays_in_use(llm, watch):
    generate(llm, PROMPTS)
    generate(llm, PROMPTS)
    assert watch.last("num_used_blocks") == 0
