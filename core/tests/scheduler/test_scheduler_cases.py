"""Rare courses of events, one by one."""

from __future__ import annotations

import copy
import gc
import sys
import weakref

import numpy as np
import pytest
from fake_engine import ENCODER_INPUTS, NAN, POISON, FakeCore, Groups, kv_cache, next_token
from toolkit_lm.config import VllmConfig
from toolkit_lm.engine.memory import size_kv_cache
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import (
    Array,
    CacheKey,
    EncoderInput,
    EngineOutput,
    EngineRequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    SequenceInputs,
    StepPlan,
)
from toolkit_lm.params import SamplingParams
from toolkit_lm.scheduler.request_blocks import RequestBlocks

PROMPT = [3, 1, 4, 1, 5, 9]


def make_core(
    num_blocks: int = 40,
    groups: Groups = ((4, None),),
    max_in_flight: int = 1,
    num_host_blocks: int = 0,
    **options,
) -> FakeCore:
    defaults = {
        "max_model_len": 32,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "preemption_mode": "recompute",
    }
    return FakeCore(
        VllmConfig.default(**defaults | options),
        kv_cache(num_blocks, list(groups), num_host_blocks),
        max_in_flight,
    )


def request(
    request_id: str, prompt: list[int], deadline: float | None = None, **params
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        deadline=deadline,
    )


def finish_all(core: FakeCore) -> dict[str, list[EngineOutput]]:
    """Outputs by request id."""
    outputs: dict[str, list[EngineOutput]] = {}
    for _ in range(200):
        if not core.has_unfinished:
            break
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    assert not core.has_unfinished
    return outputs


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def lone_good_prompt(length: int, num_tokens: int) -> list[int]:
    """A prompt whose continuation fails nowhere."""
    return next(
        p
        for p in ([k] * length for k in range(40))
        if max(continuation(p, num_tokens)) < POISON - 1
    )


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize(
    "groups",
    [
        [(4, None)],
        [(8, None), (4, 5)],
        [(8, "late")],
        [(8, None), (4, "cross")],
        [(8, None), (8, "ahead")],
        [(16, None), (8, "ahead")],
    ],
    ids=str,
)
def test_the_usual_row_is_planned_as_all_others_are(groups, max_in_flight, monkeypatch):
    prompt = lone_good_prompt(6, 12)

    def plans() -> tuple[list[StepPlan], int]:
        # Few blocks: some are preempted.
        core = make_core(14, groups, max_in_flight, max_encoder_len=8, seed=0)
        schedule = core.scheduler.schedule
        commit = core.scheduler.request_blocks.commit_next
        made = []
        usual = []
        monkeypatch.setattr(
            core.scheduler,
            "schedule",
            lambda: made.append(copy.deepcopy(plan := schedule())) or plan,
        )
        monkeypatch.setattr(
            core.scheduler.request_blocks,
            "commit_next",
            lambda *args: usual.append(commit(*args)) or usual[-1],
        )
        for index, n in enumerate((1, 2, 1)):
            encoder = (
                EncoderInput.of_tokens(ENCODER_INPUTS[0]) if groups[-1][1] == "cross" else None
            )
            params = SamplingParams(n=n, max_tokens=12 - index, ignore_eos=True)
            inputs = SequenceInputs(second_text_start=0 if encoder else None)
            core.add_request(
                EngineRequest(
                    request_id=str(index),
                    prompt_token_ids=prompt,
                    params=params,
                    encoder=encoder,
                    inputs=inputs,
                )
            )
            core.step()
        finish_all(core)
        return made, sum(usual)

    found, num_usual = plans()
    monkeypatch.setattr(RequestBlocks, "commit_next", lambda self, plan, request: False)
    expected, none = plans()
    assert found == expected
    assert num_usual > 4 and none == 0


def test_forks_of_a_leader_that_finds_its_own_output_cached():
    """The leader's window has moved past the prompt's end when it is computed again, the forks' has
    not."""
    core = make_core(groups=[(2, None), (2, 4)])
    prompt = lone_good_prompt(5, 14)
    core.add_request(request("r", prompt, n=2, max_tokens=14))
    for _ in range(9):
        core.step()
    scheduler = core.scheduler
    (running,) = scheduler.roster.running
    scheduler.roster.requeue(running)
    scheduler.request_blocks.start_over(running)
    outputs = finish_all(core)
    tokens = continuation(prompt, 14)
    assert [o.token_ids[0] for o in outputs["r"] if o.index == 1] == tokens[
        -len([o for o in outputs["r"] if o.index == 1]) :
    ]


def test_a_model_that_caches_nothing_computes_all_at_once():
    core = make_core(num_blocks=0, groups=[])
    for name in ("a", "b", "c"):
        core.add_request(request(name, PROMPT, max_tokens=1))
    outputs = core.step().outputs
    assert [(o.request_id, o.finish_reason, o.num_cached_tokens) for o in outputs] == [
        (name, "length", 0) for name in ("a", "b", "c")
    ]
    assert core.executor.plans[0].num_tokens == 3 * len(PROMPT)


def test_nobody_finds_what_a_failed_row_has_computed():
    core = make_core()
    core.add_request(request("bad", [*PROMPT, NAN, 1, 2], max_tokens=3))
    core.add_request(request("good", PROMPT, max_tokens=1))
    hashes = core.scheduler.roster.requests["bad"].leader.block_hashes
    outputs = finish_all(core)
    assert (outputs["bad"][-1].finish_reason, outputs["bad"][-1].error) == ("error", "not a number")
    assert outputs["good"][-1].finish_reason == "length"
    assert core.scheduler.blocks.find_prefix(hashes, 8) == 0


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_a_deadline_is_not_that_of_the_next_request_of_the_same_id(clock, max_in_flight):
    core = make_core(max_in_flight=max_in_flight)
    core.add_request(request("r", PROMPT, deadline=clock.now + 10, max_tokens=1))
    finish_all(core)
    clock.now += 11
    core.add_request(request("r", PROMPT, deadline=clock.now + 60, max_tokens=3))
    assert finish_all(core)["r"][-1].finish_reason == "length"


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_a_deadline_ends_what_waits_and_what_runs(clock, max_in_flight):
    core = make_core(max_in_flight=max_in_flight, max_num_seqs=1)
    prompt = lone_good_prompt(4, 20)
    core.add_request(request("runs", prompt, deadline=clock.now + 10, max_tokens=20, n=1))
    core.add_request(request("waits", prompt, deadline=clock.now - 1, max_tokens=20))
    core.add_request(request("next", prompt, max_tokens=20))
    first = [*core.step().outputs, *core.step().outputs]
    assert [(o.request_id, o.finish_reason) for o in first if o.request_id == "waits"] == [
        ("waits", "timeout")
    ]
    clock.now += 11
    outputs = finish_all(core)
    assert outputs["runs"][-1].finish_reason == "timeout"
    assert [token for o in outputs["next"] for token in o.token_ids] == continuation(prompt, 20)


def test_the_end_of_a_request_is_linear_in_its_sequences():
    def operations(num_sequences: int) -> int:
        """Number of the interpreter's operations."""
        core = make_core(1400, max_num_seqs=256, max_num_batched_tokens=2048, max_n=256)
        count = 0
        core.add_request(request("r", PROMPT, n=num_sequences))
        core.step()

        def trace(frame, event, argument):
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        sys.settrace(trace)
        try:
            core.finish("r")
        finally:
            sys.settrace(None)
        assert not core.has_unfinished
        return count

    assert operations(256) < 5 * operations(64)


@pytest.mark.parametrize("n", [1, 3])
def test_what_has_ended_is_freed_at_once(n):
    """Without the garbage collector, which would stop the engine to look for it."""
    core = make_core(100)
    core.add_request(request("r", PROMPT, max_tokens=4, n=n))
    core.add_request(request("aborted", PROMPT, max_tokens=4, n=n))
    core.step()
    ended = [weakref.ref(one) for one in core.scheduler.roster.requests.values()]
    gc.disable()
    try:
        core.finish("aborted")
        while core.has_unfinished:
            core.step()
        assert [one() for one in ended] == [None, None]
    finally:
        gc.enable()


def test_a_step_that_fails_for_an_aborted_request_is_nobodys_fault():
    core = make_core(max_in_flight=2)
    prompt = lone_good_prompt(4, 8)
    core.add_request(request("good", prompt, max_tokens=8))
    core.step()
    core.add_request(request("bad", [POISON], max_tokens=3))
    core.step()
    # The step that computes it is on its way.
    core.finish("bad")
    outputs = finish_all(core)
    assert [o.finish_reason for o in outputs["good"]][-1] == "length"
    assert not core.scheduler.quarantine.quarantined


def test_a_swapped_request_that_holds_shared_blocks_does_not_block_the_queue():
    """Both are swapped out, and keep the device's blocks that they share: nobody could be admitted,
    were they not given up."""
    core = make_core(num_blocks=9, num_host_blocks=40, preemption_mode="swap")
    prompt = lone_good_prompt(20, 10)
    for name in ("a", "b", "c"):
        core.add_request(request(name, prompt, max_tokens=10))
    outputs = finish_all(core)
    for name in ("a", "b", "c"):
        assert [token for o in outputs[name] for token in o.token_ids] == continuation(prompt, 10)
    assert (core.scheduler.blocks.num_used, core.scheduler.blocks.num_used_on_host) == (0, 0)


def test_a_preempted_request_waits_for_the_tokens_that_are_on_their_way():
    """Its sequences share a prompt: once they are preempted, their leader fits at once, while steps
    before that still run."""
    core = make_core(
        12,
        [(2, None)],
        max_in_flight=3,
        max_num_seqs=8,
        enable_prefix_caching=False,
        max_model_len=10,
    )
    prompt = lone_good_prompt(3, 6)
    for name in ("a", "b"):
        core.add_request(request(name, prompt, n=3, max_tokens=6))
    outputs = finish_all(core)
    assert (
        max(
            len([new for plan in core.executor.plans for new in plan.new if new.seq_id == seq_id])
            for seq_id in range(6)
        )
        > 1
    )
    for name in ("a", "b"):
        tokens = [
            [token for o in outputs[name] if o.index == index for token in o.token_ids]
            for index in range(3)
        ]
        assert tokens == [continuation(prompt, 6)] * 3


def test_pipeline_stages_work_on_different_sequences():
    core = make_core(max_in_flight=2, pipeline_parallel_size=2, max_num_batched_tokens=6)
    prompt = lone_good_prompt(6, 5)
    for name in ("a", "b"):
        core.add_request(request(name, prompt, max_tokens=5))
    outputs = finish_all(core)
    for name in ("a", "b"):
        assert [o.token_ids[0] for o in outputs[name]] == continuation(prompt, 5)
    # Each computes its prompt in a step of its own, and from then on they take turns.
    assert [[row.seq_id for row in plan.scheduled] for plan in core.executor.plans] == [
        [0],
        [1],
    ] * 5
    assert all(row.tokens for plan in core.executor.plans[2:] for row in plan.scheduled)


def test_a_sequence_alone_has_one_step_in_the_pipeline():
    core = make_core(max_in_flight=2, pipeline_parallel_size=2)
    prompt = lone_good_prompt(6, 5)
    core.add_request(request("a", prompt, max_tokens=5))
    for drawn in range(5):
        core.step()
        assert len(core.executor.plans) == drawn + 1
    told = [row.tokens for plan in core.executor.plans for row in plan.scheduled]
    assert told == [[], *([token] for token in continuation(prompt, 4))]


@pytest.mark.parametrize(("kind", "found"), [(None, [0, 8, 8]), ("late", [0, 0, 8])])
def test_what_a_step_writes_is_shared_within_it_where_the_cache_allows(kind, found):
    core = make_core(groups=[(4, kind)])
    prompt = lone_good_prompt(9, 3)
    for name in ("a", "b"):
        core.add_request(request(name, prompt, max_tokens=3))
    outputs = {}
    while core.has_unfinished:
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, output)
        if (
            core.scheduler.roster.requests
            and "c" not in outputs
            and "c" not in core.scheduler.roster.requests
        ):
            core.add_request(request("c", prompt, max_tokens=3))
    assert [outputs[name].num_cached_tokens for name in "abc"] == found


def picture(name: str, offset: int, length: int) -> MultiModalFeatureSpec:
    embeds = Array.of(np.zeros((length, 1), np.float32))
    return MultiModalFeatureSpec(
        modality="image",
        mm_identifier=name,
        mm_position=PlaceholderRange(offset, length),
        data={"embeds": embeds},
    )


def with_pictures(
    request_id: str, prompt: list[int], *pictures: MultiModalFeatureSpec, **params
) -> EngineRequest:
    asked = request(request_id, prompt, **params)
    asked.features = list(pictures)
    asked.cache_keys = [
        CacheKey(one.mm_position.offset, one.mm_position.end, one.mm_identifier) for one in pictures
    ]
    return asked


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize(
    "groups",
    [[(4, 5)], [(4, ("late", 5))], [(4, ("late", 1))], [(8, "late"), (4, ("late", 5))]],
    ids=str,
)
def test_what_windows_leave_behind_is_found(groups, max_in_flight):
    """Blocks are given back before the next step is planned: by then others can find what they
    hold."""
    prompt = lone_good_prompt(48, 4)
    core = make_core(40, groups, max_in_flight, max_model_len=64, max_num_batched_tokens=16)
    for request_id in ("a", "b"):
        core.add_request(request(request_id, prompt, max_tokens=4, ignore_eos=True))
        outputs = finish_all(core)[request_id]
        assert [token for output in outputs for token in output.token_ids] == continuation(
            prompt, 4
        )
    assert max(output.num_cached_tokens for output in outputs) == (
        47 // 8 * 8 if len(groups) > 1 else 44
    )


@pytest.mark.parametrize(
    "groups", [[(64, "state"), (4, None, 1)], [(4, None), (64, "state", 1)]], ids=str
)
def test_num_kv_blocks_of_a_hybrid_can_force_a_preemption(groups):
    options = {
        "max_model_len": 32,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "preemption_mode": "recompute",
    }
    config = VllmConfig.default(num_kv_blocks=10, enable_prefix_caching=False, **options)
    sized = size_kv_cache(kv_cache([0, 0], groups), config, 2**40, 0)
    core = FakeCore(config, sized, 1)
    prompts = {f"{k}": [k] * 6 for k in range(40) if max(continuation([k] * 6, 20)) < POISON - 1}
    asked = dict(list(prompts.items())[:3])
    for request_id, prompt in asked.items():
        core.add_request(request(request_id, prompt, max_tokens=20, ignore_eos=True))
    outputs = {}
    preempted = 0
    while core.has_unfinished:
        step = core.step()
        preempted += sum(getattr(event, "kind", None) == "preempted" for event in step.events)
        for output in step.outputs:
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
    assert preempted
    assert outputs == {request_id: continuation(prompt, 20) for request_id, prompt in asked.items()}


def test_forks_keep_the_picture_that_ends_their_prompt():
    """They compute the prompt's last token, which is the picture's, when the leader has left it
    behind, and another asks for its room."""
    core = make_core(encoder_cache_memory=str(4 * 4096 * 6))
    core.add_request(with_pictures("a", [7] * 6, picture("a", 0, 6), n=3, max_tokens=3))
    core.add_request(with_pictures("b", [8] * 6, picture("b", 0, 6), max_tokens=3))
    outputs = finish_all(core)
    assert {output.finish_reason for some in outputs.values() for output in some} <= {
        None,
        "stop",
        "length",
    }
    assert core._failures == 0 and not core.scheduler.quarantine.quarantined
    assert sum(plan.dropped_items.count("a") for plan in core.executor.plans) == 1


@pytest.mark.parametrize(("whole", "waiting", "running"), [(False, 1, 1), (True, 5, 5)])
def test_a_request_says_how_little_it_can_compute(whole, waiting, running):
    """Policies rely on it. Models that may cut an item need one token; others the item, and of a
    waiting one the longest."""
    core = FakeCore(
        VllmConfig.default(max_model_len=32, max_num_batched_tokens=8),
        kv_cache(40, [(4, None)]),
        whole_items=whole,
    )
    core.add_request(
        with_pictures("r", [9] * 12, picture("a", 1, 2), picture("b", 4, 5), max_tokens=1)
    )
    (one,) = core.scheduler.roster.waiting
    assert one.least_tokens == waiting
    one.leader.num_computed_tokens = 4
    assert one.least_tokens == running
    one.leader.num_computed_tokens = 9
    assert one.least_tokens == 1


def test_an_item_that_is_not_cut_must_fit_beside_the_encoder():
    """Both are computed in the step in which the request begins: one that has no room for both
    would wait for ever."""
    config = VllmConfig.default(max_model_len=32, max_encoder_len=8, max_num_batched_tokens=12)
    core = FakeCore(config, kv_cache(40, [(4, None), (2, "cross")]), whole_items=True)
    for length in (4, 5):
        request = with_pictures(f"r{length}", [9] * 12, picture("a", 0, length), max_tokens=1)
        request.encoder = EncoderInput.of_tokens(ENCODER_INPUTS[0])
        request.inputs = SequenceInputs(second_text_start=0)
        if length == 5:
            with pytest.raises(
                RequestError,
                match="has 5 tokens, and the model needs them all in one step beside the "
                "encoder's 8",
            ):
                core.add_request(request)
        else:
            core.add_request(request)
    assert [output.finish_reason for output in finish_all(core)["r4"]][-1] == "length"


def test_a_swapped_request_starts_over_for_the_only_running_one():
    """It keeps blocks that it shares, such as an encoder's. The one that runs would be preempted
    for want of them, and admitted again, forever."""
    core = FakeCore(
        VllmConfig.default(max_model_len=20, max_encoder_len=8, max_num_seqs=4),
        kv_cache(24, [(2, None), (2, "cross")], 5),
    )
    core.scheduler.preemption.prefers_swap = lambda *_: True
    for name in ("swapped", "second", "third"):
        core.add_request(
            EngineRequest(
                request_id=name,
                prompt_token_ids=lone_good_prompt(4, 4),
                params=SamplingParams(max_tokens=4, ignore_eos=True),
                encoder=EncoderInput.of_tokens(ENCODER_INPUTS[0]),
                inputs=SequenceInputs(second_text_start=0),
            )
        )
    core.step()
    scheduler = core.scheduler
    swapped, second, third = scheduler.roster.running
    scheduler._preempt(StepPlan(), swapped)
    assert swapped.swapped
    assert not scheduler.admission.makes_room(second), "another runs, which may give way"
    scheduler._preempt(StepPlan(), third)
    on_host = scheduler.blocks.num_used_on_host
    assert on_host > 0
    assert scheduler.admission.makes_room(second)
    assert scheduler.blocks.num_used_on_host < on_host
    assert [one.swapped for one in (swapped, third)].count(True) == 1
    assert scheduler.admission.makes_room(second)
    assert not scheduler.admission.makes_room(second), "no more is swapped"
