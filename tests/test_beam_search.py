"""Beam search and best_of through the whole engine: transformers' results in any company, under
preemption, and its blocks given back."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from fake_engine import check_blocks
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import RequestError
from toolkit_lm.plugin import hookimpl

LENGTHS = [9, 33, 1, 17, 4, 24]
ROOMY = {"num_kv_blocks": 600, "block_size": 4, "max_model_len": 64, "max_num_seqs": 20}
# The widest search takes up to 38 blocks: two of them do not fit, and a step computes chunks of a
# prompt.
TIGHT = {**ROOMY, "num_kv_blocks": 40, "max_num_batched_tokens": 26}
ENGINES = {
    "roomy": ROOMY,
    "overlapping": {**ROOMY, "overlap": True},
    "recomputing": {**TIGHT, "preemption_mode": "recompute"},
    "swapping": {**TIGHT, "preemption_mode": "swap", "swap_memory": "64MiB"},
    "swapping little": {**TIGHT, "preemption_mode": "swap", "swap_memory": "64KiB"},
    "recomputing and overlapping": {**TIGHT, "preemption_mode": "recompute", "overlap": True},
    "swapping and overlapping": {
        **TIGHT,
        "preemption_mode": "swap",
        "swap_memory": "64MiB",
        "overlap": True,
    },
    "swapping without prefix caching": {
        **TIGHT,
        "preemption_mode": "swap",
        "swap_memory": "64MiB",
        "enable_prefix_caching": False,
    },
    "recomputing without prefix caching": {
        **TIGHT,
        "preemption_mode": "recompute",
        "enable_prefix_caching": False,
    },
}


class Preemptions:
    """A plugin that notes who was preempted."""

    name = "preemptions"

    def __init__(self):
        self.request_ids = []

    @hookimpl
    def toolkit_event(self, event):
        if getattr(event, "kind", None) == "preempted":
            self.request_ids.append(event.request_id)


@pytest.fixture(scope="module")
def llama(make_llama):
    return make_llama("beams")


@pytest.fixture(scope="module")
def prompts(llama):
    generator = torch.Generator().manual_seed(11)
    return [
        torch.randint(16, llama[1].config.vocab_size, (n,), generator=generator).tolist()
        for n in LENGTHS
    ]


@pytest.fixture(scope="module")
def searches(llama, prompts):
    """(prompt, params): every width, length penalty and early stopping, over lengths, n and end
    tokens that do come up."""
    likely = []
    for prompt in prompts:
        out = llama[1].generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
        likely.append(out[0, len(prompt) :].tolist())
    work = []
    for number, (width, penalty, early) in enumerate(
        product([2, 3, 5], [-1.0, 0.0, 1.0, 2.0], [False, True, "never"])
    ):
        which = (number * 5 + width) % len(prompts)
        ends = [[likely[which][1], likely[which][6]], [likely[which][3]], []][number % 3]
        params = SamplingParams(
            use_beam_search=True,
            beam_width=width,
            n=1 + number % width,
            length_penalty=penalty,
            early_stopping=early,
            max_tokens=[24, 16, 10, 1][number % 4],
            min_tokens=[0, 0, 5][number % 3] if number % 4 < 3 else 0,
            stop_token_ids=ends or None,
            ignore_eos=not ends,
        )
        work.append((prompts[which], params))
    return work


@pytest.fixture(scope="module")
def expected(llama, searches):
    """Per search, transformers' (tokens, score) of each sequence."""
    return [transformers_search(llama[1], prompt, params) for prompt, params in searches]


def transformers_search(model, prompt, params):
    ends = [
        *([] if params.ignore_eos else [model.config.eos_token_id]),
        *(params.stop_token_ids or ()),
    ]
    found = model.generate(
        torch.tensor([prompt]),
        num_beams=params.num_sequences,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        eos_token_id=ends or None,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = [until_the_end(row, ends) for row in found.sequences[:, len(prompt) :].tolist()]
    return list(zip(rows, found.sequences_scores.tolist(), strict=True))


def until_the_end(tokens, ends):
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)


def assert_found(output, reference, params):
    """The same sequences in the same order; two whose scores are closer than 1e-3 may have changed
    places."""
    assert output.error is None and len(output.outputs) == len(reference)
    for one, (tokens, score) in zip(output.outputs, reference, strict=True):
        others = [t for t, s in reference if abs(s - score) < 1e-3]
        assert one.token_ids == tokens or one.token_ids in others
        # Each of n log probabilities may differ by 1e-4, and the score is their sum over n **
        # length_penalty. transformers adds up in float32, which has 7 digits.
        each = 1e-4 * max(1.0, len(tokens) ** (1 - params.length_penalty))
        assert one.score == pytest.approx(
            score, abs=each if one.token_ids == tokens else 1e-3, rel=5e-7
        )
        assert one.score == pytest.approx(
            one.cumulative_logprob / len(one.token_ids) ** params.length_penalty
        )
        ended = one.token_ids[-1] in (params.stop_token_ids or ())
        assert one.stop_reason == (one.token_ids[-1] if ended else None)
        assert one.finish_reason == (
            "length"
            if one.finish_reason == "length" and len(one.token_ids) == params.max_tokens
            else "stop"
        )
    assert [one.index for one in output.outputs] == list(range(len(reference)))


def assert_no_blocks_are_left(llm):
    blocks = llm.engine.client.core.scheduler.blocks
    check_blocks(blocks)
    assert (blocks.num_used, blocks.num_used_on_host) == (0, 0)


@pytest.mark.parametrize("name", ENGINES)
def test_the_results_of_transformers_in_one_batch_with_others(
    llama, prompts, searches, expected, name
):
    preemptions = Preemptions()
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(str(llama[0]), plugins=[preemptions], **ENGINES[name]) as llm:
        alone = [llm.generate({"prompt_token_ids": p}, greedy, use_tqdm=False)[0] for p in prompts]
        work = [*searches, *((p, greedy) for p in prompts)]
        # Searches and plain requests take turns.
        order = sorted(range(len(work)), key=lambda i: (i * 7) % len(work))
        outputs = llm.generate(
            [{"prompt_token_ids": work[i][0]} for i in order],
            [work[i][1] for i in order],
            use_tqdm=False,
        )
        found = dict(zip(order, outputs, strict=True))
        for i, reference in enumerate(expected):
            assert_found(found[i], reference, searches[i][1])
        for i, one in enumerate(alone):
            assert found[len(searches) + i].outputs[0].token_ids == one.outputs[0].token_ids
        assert_no_blocks_are_left(llm)
    preempted = [one.request_id for one, i in zip(outputs, order, strict=True) if i < len(searches)]
    num_preempted = sum(preemptions.request_ids.count(one) for one in preempted)
    assert num_preempted > 2 if ENGINES[name].get("preemption_mode") else num_preempted == 0


def test_the_searches_are_worth_comparing(expected, searches):
    """Some end early by an end token, some go to their full length, and penalties and early
    stopping make a difference."""
    ended = [
        len(tokens) < params.max_tokens
        for (_, params), rows in zip(searches, expected, strict=True)
        for tokens, _ in rows
    ]
    assert 0.2 < sum(ended) / len(ended) < 0.8


@pytest.fixture(scope="module")
def llm(llama):
    with LLM(str(llama[0]), **ROOMY) as llm:
        yield llm


def generate(llm, prompt, params):
    return llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]


def test_the_prompt_is_computed_once(llm, prompts, monkeypatch):
    tokens = []
    runner = llm.engine.client.core.executor.runner
    execute = runner.execute
    monkeypatch.setattr(
        runner, "execute", lambda plan: (tokens.append(plan.num_tokens), execute(plan))[1]
    )
    llm.reset_prefix_cache()
    params = SamplingParams(use_beam_search=True, n=4, max_tokens=6, ignore_eos=True)
    generate(llm, prompts[1], params)
    assert tokens == [len(prompts[1]), 4, 4, 4, 4, 4]
    assert generate(llm, prompts[1], params).num_cached_tokens == 32
    assert_no_blocks_are_left(llm)


def test_allowed_tokens_are_masks_over_the_log_probabilities(llm, llama, prompts):
    allowed = [20, 33, 47, 110, 200, 201]
    params = SamplingParams(
        use_beam_search=True, n=3, max_tokens=5, ignore_eos=True, allowed_token_ids=allowed
    )
    found = llama[1].generate(
        torch.tensor([prompts[0]]),
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=5,
        eos_token_id=None,
        do_sample=False,
        prefix_allowed_tokens_fn=lambda *_: allowed,
        return_dict_in_generate=True,
        output_scores=True,
    )
    reference = list(
        zip(
            found.sequences[:, len(prompts[0]) :].tolist(),
            found.sequences_scores.tolist(),
            strict=True,
        )
    )
    assert_found(generate(llm, prompts[0], params), reference, params)


def test_bad_words_are_not_found(llm):
    params = SamplingParams(use_beam_search=True, n=2, max_tokens=12, ignore_eos=True)
    text = llm.generate("abc", params, use_tqdm=False)[0].outputs[0].text
    word = next(character for character in text if character.isascii() and character.isalnum())
    others = llm.generate("abc", params.replace(bad_words=[word]), use_tqdm=False)[0].outputs
    assert all(word not in one.text for one in others)


def test_masks_that_leave_too_few_sequences_fail_the_request_alone(llm):
    few = SamplingParams(
        use_beam_search=True, n=3, max_tokens=4, ignore_eos=True, allowed_token_ids=[50]
    )
    good = SamplingParams(use_beam_search=True, n=2, max_tokens=4, ignore_eos=True)
    first, second = llm.generate(["a", "b"], [few, good], use_tqdm=False)
    assert (
        "leave 1 sequences, and n is 3" in first.error
        and [one.finish_reason for one in first.outputs] == ["error"] * 3
    )
    assert second.error is None and [one.finish_reason for one in second.outputs] == ["length"] * 2
    assert_no_blocks_are_left(llm)


def test_logits_that_are_not_finite_fail_the_request_alone(llm, monkeypatch):
    model = llm.engine.client.core.executor.runner.model
    compute = model.compute_logits
    steps = []

    def spoiled(hidden_states):
        logits = compute(hidden_states)
        steps.append(len(logits))
        # In the second step: one of the three beams of the first request, and then the other
        # request's.
        if len(steps) == 2:
            logits[1] = torch.nan
        return logits

    monkeypatch.setattr(model, "compute_logits", spoiled)
    params = SamplingParams(use_beam_search=True, n=3, max_tokens=4, ignore_eos=True)
    first, second = llm.generate(["a", "b"], params, use_tqdm=False)
    assert (
        first.error == "the model's logits are not finite"
        and [one.finish_reason for one in first.outputs] == ["error"] * 3
    )
    assert second.error is None and all(len(one.token_ids) == 4 for one in second.outputs)
    assert_no_blocks_are_left(llm)


def test_there_is_no_text_before_the_end(llm):
    for params in (
        SamplingParams(use_beam_search=True, n=2, max_tokens=4, ignore_eos=True),
        SamplingParams(best_of=3, n=2, max_tokens=4, ignore_eos=True, logprobs=1),
    ):
        llm.engine.add_request("one", "abc", params)
        outputs = []
        while llm.engine.has_unfinished_requests():
            outputs += llm.engine.step()
        *partial, last = outputs
        assert all(
            not one.text and not one.token_ids and not one.finished()
            for output in partial
            for one in output.outputs
        )
        assert [len(output.outputs) for output in outputs] == [2] * len(outputs)
        assert last.finished and all(one.text and one.score is not None for one in last.outputs)


def test_best_of_returns_the_likeliest_per_token(llm, prompts):
    """The same seed draws the same sequences, whether all of them are returned or the best."""
    params = SamplingParams(
        n=6, temperature=1.5, seed=3, max_tokens=12, stop_token_ids=list(range(16, 40)), logprobs=0
    )
    every = generate(llm, prompts[3], params).outputs
    ranked = sorted(
        every, key=lambda one: one.cumulative_logprob / len(one.token_ids), reverse=True
    )
    assert len({len(one.token_ids) for one in every}) > 1, (
        "sequences of one length would not show what a mean is"
    )
    best = generate(llm, prompts[3], params.replace(n=2, best_of=6, logprobs=None)).outputs
    assert [one.token_ids for one in best] == [one.token_ids for one in ranked[:2]]
    assert [one.index for one in best] == [0, 1] and [one.logprobs for one in best] == [None, None]
    assert [one.score for one in best] == pytest.approx(
        [one.cumulative_logprob / len(one.token_ids) for one in ranked[:2]]
    )
    with_logprobs = generate(llm, prompts[3], params.replace(n=2, best_of=6)).outputs
    assert [len(one.logprobs) for one in with_logprobs] == [len(one.token_ids) for one in best]
    assert_no_blocks_are_left(llm)


def test_an_aborted_search_ends_as_a_whole(llm):
    for params in (
        SamplingParams(use_beam_search=True, n=2, max_tokens=30),
        SamplingParams(best_of=3, n=2, max_tokens=30),
    ):
        llm.engine.add_request("one", "abc", params)
        llm.engine.step()
        llm.engine.step()
        [output] = llm.engine.abort("one")
        assert output.finished and [one.finish_reason for one in output.outputs] == ["abort"] * 2
        llm.engine.advance()
        assert_no_blocks_are_left(llm)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"use_beam_search": True, "beam_width": 21},
            "beam_width",
            "beam_width is 21, but a step holds at most 20 sequences",
        ),
        ({"best_of": 21}, "best_of", "best_of is 21, but a step holds at most 20 sequences"),
        ({"use_beam_search": True, "n": 10**6}, "n", "at most 128 .max_n."),
        ({"use_beam_search": True, "beam_width": 10**6}, "beam_width", "at most 128 .max_n."),
    ],
)
def test_more_sequences_than_fit_are_refused(llm, fields, param, message):
    with pytest.raises(RequestError, match=message) as error:
        llm.generate("a", SamplingParams(**fields), use_tqdm=False)
    assert error.value.param == param
