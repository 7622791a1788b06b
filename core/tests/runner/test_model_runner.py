"""ModelRunner over a model whose results are known: plans in, tokens out."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from fake_model import (
    BLOCK_SIZE,
    NAN,
    VOCAB,
    SumBackend,
    SumModel,
    continuation,
    make_runner,
    new,
    next_token,
    row,
)
from toolkit_lm.messages import BlockCopy, BlockMove, ScheduledSequence, SequenceInputs, StepPlan
from toolkit_lm.model import logits_of
from toolkit_lm.params import SamplingParams
from toolkit_lm.runner import row_sampler
from toolkit_lm.step import StepPart
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def runner():
    runner = make_runner()
    yield runner
    runner.shutdown()


def test_it_says_what_it_loaded(runner):
    assert runner.selections["attention"].backend is SumBackend
    [spec] = runner.kv_cache_specs().values()
    assert (spec.kind, spec.block_size) == ("full", BLOCK_SIZE)
    assert runner.parts.facts() == {}


def test_a_prompt_and_its_continuation(runner):
    drawn = runner.execute(StepPlan(new=[new(0, PROMPT, [7, 2])], scheduled=[row(0, 5)])).token_ids
    for start, blocks in enumerate(([], [], [], [4], []), 5):
        drawn += runner.execute(StepPlan(scheduled=[row(0, 1, blocks, start=start)])).token_ids
    assert [token for [token] in drawn] == continuation(PROMPT, 6)


def test_rows_of_all_kinds_in_one_step(runner):
    """A decode, a prompt in chunks, and a prompt at once."""
    runner.execute(StepPlan(new=[new(0, PROMPT, [0, 1])], scheduled=[row(0, 5)]))
    rows = [row(0, 1, start=5), row(1, 2, samples=False), row(2, 2)]
    plan = StepPlan(new=[new(1, [9, 8, 7], [2]), new(2, [2, 2], [3])], scheduled=rows)
    assert runner.execute(plan).token_ids == [
        [continuation(PROMPT, 2)[-1]],
        [],
        [next_token([2, 2])],
    ]
    assert runner.execute(StepPlan(scheduled=[row(1, 1, start=2)])).token_ids == [
        [next_token([9, 8, 7])]
    ]


def test_a_plan_that_computes_nothing(runner):
    runner.execute(StepPlan(new=[new(0, PROMPT, [0, 1])], scheduled=[row(0, 5)]))
    assert runner.execute(StepPlan(dropped=[0])).token_ids == []
    assert runner._batch.row_of == {}


def test_a_block_is_copied_before_it_is_written(runner):
    """Two sequences share the first tokens; the second writes into a copy of their block."""
    runner.execute(StepPlan(new=[new(0, PROMPT, [0, 1])], scheduled=[row(0, 5)]))
    rows = [row(0, 1, start=5), row(1, 1, start=2)]
    plan = StepPlan(
        new=[new(1, [3, 1, 9], [5])], scheduled=rows, copies=[BlockCopy(0, source=0, target=5)]
    )
    assert runner.execute(plan).token_ids == [
        [continuation(PROMPT, 2)[-1]],
        [next_token([3, 1, 9])],
    ]


def test_a_move_comes_with_its_copy(runner):
    runner.execute(StepPlan(new=[new(0, PROMPT, [0, 1])], scheduled=[row(0, 5)]))
    plan = StepPlan(
        scheduled=[row(0, 1, start=5)],
        copies=[BlockCopy(0, source=1, target=6)],
        moves=[BlockMove(0, 0, 1, 6)],
    )
    assert runner.execute(plan).token_ids == [[continuation(PROMPT, 2)[-1]]]


def test_to_the_host_and_back(runner):
    runner.execute(StepPlan(new=[new(0, PROMPT, [0, 1])], scheduled=[row(0, 5)]))
    # Another sequence takes the blocks meanwhile.
    swap_out = [BlockCopy(0, source=0, target=3), BlockCopy(0, source=1, target=2)]
    runner.execute(
        StepPlan(
            dropped=[0], swap_out=swap_out, new=[new(1, [6] * 6, [0, 1])], scheduled=[row(1, 6)]
        )
    )
    back = new(0, [*PROMPT, *continuation(PROMPT, 1)], [8, 9], num_prompt_tokens=5)
    swap_in = [BlockCopy(0, source=3, target=8), BlockCopy(0, source=2, target=9)]
    assert runner.execute(
        StepPlan(swap_in=swap_in, new=[back], scheduled=[row(0, 1, start=5)])
    ).token_ids == [[continuation(PROMPT, 2)[-1]]]


def test_beams_get_candidates_and_the_others_tokens(runner):
    plan = StepPlan(
        new=[new(0, PROMPT, [0, 1], num_candidates=3), new(1, [2, 2], [2])],
        scheduled=[row(0, 5), row(1, 2)],
    )
    result = runner.execute(plan)
    assert result.token_ids == [[], [next_token([2, 2])]]
    [candidates] = result.candidates.values()
    assert list(result.candidates) == [0] and candidates.token_ids[0] == next_token(PROMPT)
    assert len(candidates.token_ids) == 3 and candidates.logprobs == sorted(
        candidates.logprobs, reverse=True
    )


def test_a_row_that_is_not_finite_fails_alone(runner):
    bad = new(0, [NAN, 1], [0])
    bad_beam = new(2, [NAN], [3], num_candidates=2)
    result = runner.execute(
        StepPlan(
            new=[bad, new(1, [2, 2], [2]), bad_beam], scheduled=[row(0, 2), row(1, 2), row(2, 1)]
        )
    )
    assert result.token_ids[1] == [next_token([2, 2])]
    assert result.errors == dict.fromkeys((0, 2), "the model's logits are not finite")


def test_log_probabilities_of_those_that_ask(runner):
    asking = new(
        1, PROMPT, [0, 1], params=SamplingParams(temperature=0, logprobs=2, prompt_logprobs=0)
    )
    plan = StepPlan(new=[new(0, [2], [2]), asking], scheduled=[row(0, 1), row(1, 3, samples=False)])
    result = runner.execute(plan)
    assert result.logprobs == [] and [one.token_ids for one in result.prompt_logprobs[1]] == [
        [1],
        [4],
        [1],
    ]
    result = runner.execute(StepPlan(scheduled=[row(0, 1, start=1), row(1, 2, start=3)]))
    assert [one.token_ids for one in result.prompt_logprobs[1]] == [[5]]
    none, [logprobs] = result.logprobs
    assert (
        none == []
        and logprobs.token_ids[:2] == [next_token(PROMPT)] * 2
        and logprobs.rank == 1
        and len(logprobs.token_ids) == 3
    )


def test_the_sampler_s_state_survives_a_preemption():
    asking = {
        "params": SamplingParams(temperature=0),
        "inputs": SequenceInputs(logits_processors={"drift": {"level": 7.0}}),
    }
    runs = []
    for preempted_after in (None, 3):
        runner = make_runner()
        tokens = list(PROMPT)
        states = []
        plan = StepPlan(new=[new(0, PROMPT, [0, 1, 2, 3], **asking)], scheduled=[row(0, 5)])
        for step in range(7):
            result = runner.execute(plan)
            tokens += result.token_ids[0]
            states.append(result.sampler_state[0])
            plan = StepPlan(scheduled=[row(0, 1, start=5 + step)])
            if step == preempted_after:
                back = new(
                    0,
                    list(tokens),
                    [4, 5, 6, 7],
                    **asking,
                    num_prompt_tokens=5,
                    sampler_state=states[-1],
                )
                plan = StepPlan(dropped=[0], new=[back], scheduled=[row(0, len(tokens))])
        runs.append((tokens, states))
        runner.shutdown()
    assert runs[0] == runs[1]
    assert len({str(state) for state in runs[0][1]}) > 3


def test_those_without_a_state_return_none(runner):
    assert (
        runner.execute(StepPlan(new=[new(0, PROMPT, [0, 1])], scheduled=[row(0, 5)])).sampler_state
        == {}
    )


def test_after_shutdown_nothing_is_held(runner):
    runner.shutdown()
    assert not hasattr(runner, "model") and not hasattr(runner, "_cache")


class Axes(StepPart):
    """Gives rotary positions of three axes, and counts tokens for each of its sequences."""

    def __init__(self, model, config, device, **given):
        super().__init__(model, config, device, **given)
        self.seen: dict[int, int] = {}
        model.axes = []

    def add(self, seq):
        self.seen[seq.seq_id] = 0

    def remove(self, seq_id):
        self.seen.pop(seq_id, None)

    def inputs(self, inputs):
        index = torch.from_numpy(inputs.token_index)
        return {"positions": torch.stack([index, index // 2, index % 2])}

    def finish(self, inputs, hidden_states, result, step):
        assert len(hidden_states) == len(inputs.token_index)
        for scheduled in inputs.plan.scheduled:
            self.seen[scheduled.seq_id] += scheduled.num_tokens


def test_a_model_brings_a_part_of_its_own(monkeypatch):
    monkeypatch.setattr(SumModel, "parts", {"axes": Axes})
    runner = make_runner()
    [state] = runner.parts.by_name.values()
    positions = []
    forward = runner.model.forward
    monkeypatch.setattr(
        runner.model,
        "forward",
        lambda ids, positions_: (positions.append(positions_), forward(ids, positions_))[1],
    )
    monkeypatch.setattr(
        type(runner.model),
        "__call__",
        lambda self, ids, **inputs: self.forward(ids, inputs["positions"]),
    )
    drawn = runner.execute(StepPlan(new=[new(0, PROMPT, [7, 2])], scheduled=[row(0, 5)])).token_ids
    assert positions[0].tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 1, 2], [0, 1, 0, 1, 0]]
    drawn += runner.execute(StepPlan(scheduled=[row(0, 1, start=5)])).token_ids
    # Slots follow from the token's index, whatever its positions are.
    assert [token for [token] in drawn] == continuation(PROMPT, 2)
    assert state.seen == {0: 6}
    runner.execute(StepPlan(dropped=[0]))
    assert state.seen == {}
    runner.shutdown()


def drafted(start: int, known: int, drafts: list[int]) -> ScheduledSequence:
    """A row that computes a token and drafts of those after it."""
    scheduled = row(0, 1 + len(drafts), start=start)
    scheduled.tokens = [known, *drafts]
    scheduled.num_drafts = len(drafts)
    return scheduled


@pytest.mark.parametrize("num_right", range(4))
@pytest.mark.parametrize("num_wrong", range(3))
def test_drafts_count_as_far_as_they_are_drawn(runner, num_right, num_wrong):
    expected = continuation(PROMPT, 8)
    [first] = runner.execute(
        StepPlan(new=[new(0, PROMPT, [7, 2, 4, 5])], scheduled=[row(0, 5)])
    ).token_ids
    drafts = [
        *expected[1 : 1 + num_right],
        *[(expected[1 + num_right] + 1 + i) % VOCAB for i in range(num_wrong)],
    ]
    [drawn] = runner.execute(StepPlan(scheduled=[drafted(5, *first, drafts)])).token_ids
    assert drawn == expected[1 : 2 + num_right]
    # Wrong tokens are overwritten.
    [after] = runner.execute(StepPlan(scheduled=[row(0, 1, start=6 + num_right)])).token_ids
    assert after == [expected[2 + num_right]]


def test_rows_with_and_without_drafts_in_one_step(runner):
    """Each with what it asks for: log probabilities of all its tokens, a beam's candidates."""
    expected = continuation(PROMPT, 4)
    asking = new(0, PROMPT, [7, 2, 4], params=SamplingParams(temperature=0, logprobs=0))
    runner.execute(StepPlan(new=[asking, new(1, [2, 2], [3])], scheduled=[row(0, 5), row(1, 2)]))
    rows = [row(2, 5), drafted(5, expected[0], expected[1:3]), row(1, 1, start=2)]
    result = runner.execute(
        StepPlan(new=[new(2, PROMPT, [0, 1], num_candidates=2)], scheduled=rows)
    )
    assert result.token_ids == [[], expected[1:], [continuation([2, 2], 2)[-1]]]
    assert [[entry.token_ids[0] for entry in entries] for entries in result.logprobs] == [
        [],
        expected[1:],
        [],
    ]
    assert result.candidates[2].token_ids[0] == expected[0]


def test_a_failure_after_a_draft_is_the_row_s(runner):
    expected = continuation(PROMPT, 2)
    runner.execute(StepPlan(new=[new(0, PROMPT, [7, 2, 4])], scheduled=[row(0, 5)]))
    result = runner.execute(StepPlan(scheduled=[drafted(5, expected[0], [NAN])]))
    assert (result.token_ids, result.errors) == ([expected[1:]], {}), (
        "a draft that is not drawn has no say"
    )


class Headed(nn.Module):
    """A head that counts the rows whose likeliest token it was asked for, and those whose
    logits."""

    def __init__(self, compute_logits):
        super().__init__()
        self.compute_logits = compute_logits
        self.asked = 0
        self.computed = 0

    def forward(self, hidden_states):
        self.computed += len(hidden_states)
        return self.compute_logits(hidden_states)

    def likeliest(self, hidden_states):
        self.asked += len(hidden_states)
        return self.compute_logits(hidden_states).max(-1)


class HeadedModel(SumModel):
    def __init__(self, **given):
        super().__init__(**given)
        self.head = Headed(super().compute_logits)

    @logits_of("head")
    def compute_logits(self, hidden_states):
        return self.head(hidden_states)


class ScaledModel(HeadedModel):
    def compute_logits(self, hidden_states):
        return super().compute_logits(hidden_states) / 2


@pytest.fixture
def head(runner):
    made = HeadedModel(vllm_config=runner.config)
    made.attention = runner.model.attention
    runner.model = made
    runner.init_kv_cache(runner.kv_cache)
    return made.head


def test_greedy_rows_need_no_logits(runner, head):
    expected = continuation(PROMPT, 2), continuation([2, 2], 2)
    plan = StepPlan(
        new=[new(0, PROMPT, [0, 1]), new(1, [2, 2], [2])], scheduled=[row(0, 5), row(1, 2)]
    )
    assert runner.execute(plan).token_ids == [[expected[0][0]], [expected[1][0]]]
    assert runner.execute(
        StepPlan(scheduled=[row(0, 1, start=5), row(1, 1, start=2)])
    ).token_ids == [[expected[0][1]], [expected[1][1]]]
    assert (head.asked, head.computed) == (4, 0)
    # A chunk that ends before the prompt does has no result.
    runner.execute(
        StepPlan(
            dropped=[0],
            new=[new(2, [3, 1, 2], [4])],
            scheduled=[row(2, 2, samples=False), row(1, 1, start=3)],
        )
    )
    assert (head.asked, head.computed) == (5, 0)


@pytest.mark.parametrize(
    "wanted",
    [
        {"temperature": 1.0},
        {"logprobs": 0},
        {"n": 1, "best_of": 2},
        {"logit_bias": {5: 1.0}},
        {"allowed_token_ids": [4, 5]},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"min_tokens": 1},
    ],
    ids=lambda wanted: next(reversed(wanted)),
)
def test_one_row_that_asks_more_of_the_logits_has_them_made(runner, head, wanted):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 9} | wanted)
    runner.execute(
        StepPlan(
            new=[new(0, PROMPT, [0, 1]), new(1, [2, 2], [2], params=params)],
            scheduled=[row(0, 5), row(1, 2)],
        )
    )
    assert (head.asked, head.computed) == (0, 2)
    # Gone with the row that asked.
    runner.execute(StepPlan(dropped=[1], scheduled=[row(0, 1, start=5)]))
    assert (head.asked, head.computed) == (1, 2)


@pytest.mark.parametrize(
    "inputs",
    [
        SequenceInputs(bad_words=[[5]]),
        SequenceInputs(forced_tokens={0: 5}),
        SequenceInputs(logits_processors={"drift": {"level": 1.0}}),
    ],
    ids=["bad_words", "forced_tokens", "logits_processors"],
)
def test_one_row_that_others_have_a_say_in_has_the_logits_made(runner, head, inputs):
    seq = new(1, [2, 2], [2], inputs=inputs)
    runner.execute(StepPlan(new=[new(0, PROMPT, [0, 1]), seq], scheduled=[row(0, 5), row(1, 2)]))
    assert (head.asked, head.computed) == (0, 2)


def test_beams_and_prompt_logprobs_have_the_logits_made_and_greedy_drafts_do_not(runner, head):
    runner.execute(StepPlan(new=[new(0, PROMPT, [0, 1], num_candidates=2)], scheduled=[row(0, 5)]))
    assert (head.asked, head.computed) == (0, 1)
    asking = new(1, PROMPT, [2, 3], params=SamplingParams(temperature=0, prompt_logprobs=0))
    runner.execute(StepPlan(dropped=[0], new=[asking], scheduled=[row(1, 5)]))
    assert (head.asked, head.computed) == (1, 5), (
        "those of the prompt, and not the row's that draws"
    )
    runner.execute(StepPlan(dropped=[1], new=[new(0, PROMPT, [0, 1])], scheduled=[row(0, 5)]))
    runner.execute(StepPlan(scheduled=[drafted(5, continuation(PROMPT, 1)[0], [3])]))
    assert (head.asked, head.computed) == (4, 5)


def test_logits_that_a_model_changes_are_made(runner, head):
    model = ScaledModel(vllm_config=runner.config)
    model.attention = runner.model.attention
    runner.model = model
    runner.init_kv_cache(runner.kv_cache)
    assert runner.execute(
        StepPlan(new=[new(0, PROMPT, [0, 1])], scheduled=[row(0, 5)])
    ).token_ids == [continuation(PROMPT, 1)]
    assert (model.head.asked, model.head.computed) == (0, 1)


@pytest.mark.parametrize(
    "others", [{"temperature": 0}, {"temperature": 1.0}], ids=["plain", "drawing"]
)
def test_logits_that_are_not_finite_fail_their_row_alike(runner, head, others):
    params = SamplingParams(**others)
    rows = [
        new(0, [1, NAN], [0], params=SamplingParams(temperature=0)),
        new(1, [2, 2], [1], params=params),
    ]
    result = runner.execute(StepPlan(new=rows, scheduled=[row(0, 2), row(1, 2)]))
    assert result.errors == {0: "the model's logits are not finite"}


class MadeTensors(TorchDispatchMode):
    """Notes the shapes of the tensors that get memory of their own."""

    def __init__(self):
        super().__init__()
        self.shapes = []
        self.paused = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {
            one.untyped_storage().data_ptr()
            for one in tree_leaves((args, kwargs))
            if isinstance(one, torch.Tensor)
        }
        made = [
            one
            for one in tree_leaves(out)
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in given
        ]
        self.shapes += [tuple(one.shape) for one in made if not self.paused]
        return out

    def leaving_out(self, function):
        def call(*args, **kwargs):
            self.paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self.paused = False

        return call


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_decode_step_makes_no_tensor_beside_the_model_s_and_the_sampler_s(
    runner, monkeypatch, num_rows
):
    made = MadeTensors()
    monkeypatch.setattr(runner.model, "forward", made.leaving_out(runner.model.forward))
    monkeypatch.setattr(runner.model, "likeliest", made.leaving_out(runner.model.likeliest))
    monkeypatch.setattr(row_sampler, "greedy_sample", made.leaving_out(row_sampler.greedy_sample))
    prompts = [new(i, [1 + i, 2], [i]) for i in range(num_rows)]
    with made:
        runner.execute(StepPlan(new=prompts, scheduled=[row(i, 2) for i in range(num_rows)]))
        assert made.shapes == [(num_rows, 1)], (
            "of a prompt's hidden states only the last are wanted"
        )
        made.shapes.clear()
        result = runner.execute(StepPlan(scheduled=[row(i, 1, start=2) for i in range(num_rows)]))
    assert made.shapes == []
    assert result.token_ids == [continuation([1 + i, 2], 2)[1:] for i in range(num_rows)]


def temporary_bytes(num_rows: int, params: list[SamplingParams]) -> int:
    """Peak of a decode step's memory beyond what it leaves allocated. The rows take turns with
    `params`."""
    runner = make_runner(
        num_blocks=8 * num_rows, max_num_seqs=num_rows, max_num_batched_tokens=2 * num_rows
    )
    prompts = [
        new(i, [1 + i % 7, 2], list(range(8 * i, 8 * i + 8)), params=params[i % len(params)])
        for i in range(num_rows)
    ]
    runner.execute(StepPlan(new=prompts, scheduled=[row(i, 2) for i in range(num_rows)]))
    for start in range(2, 6):
        plan = StepPlan(scheduled=[row(i, 1, start=start) for i in range(num_rows)])
        tracemalloc.start()
        result = runner.execute(plan)
        left, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(result.token_ids) == num_rows
    runner.shutdown()
    return peak - left


GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=0.8)
FILTERED = SamplingParams(temperature=0.8, top_k=3, top_p=0.9, min_p=0.01)


@pytest.mark.parametrize(
    "params",
    [[GREEDY], [DRAWN], [FILTERED], [GREEDY, DRAWN, FILTERED]],
    ids=["greedy", "drawn", "filtered", "mixed"],
)
def test_the_temporary_memory_of_a_decode_step_does_not_grow_with_the_batch(params):
    """In the last of several steps, on 8 rows and on 256.

    Counted are Python's objects and numpy's arrays, in all that `execute` calls: the most bytes at
    a time, less those that are left after it, which are the result's. Tensors are not counted: the
    model and the sampler make theirs.
    """
    # The list of drawn ids has eight bytes a row, and becomes part of the result.
    assert temporary_bytes(256, params) <= temporary_bytes(8, params) + 8 * 256
