"""EngineCore over an executor that computes no model: the loop, recovery from failures, and what is
told."""

from __future__ import annotations

import time

import pytest
from fake_engine import NAN, PLUGINS, POISON, FakeCore, FakeExecutor, kv_cache, next_token
from toolkit_lm.config import VllmConfig
from toolkit_lm.engine.core import EngineCore
from toolkit_lm.errors import CapacityError, EngineDeadError, RequestError
from toolkit_lm.events import LoadEvent, RequestEvent, StepEvent
from toolkit_lm.kv import FullSpec
from toolkit_lm.messages import BegunSequence, EngineOutputs, EngineRequest
from toolkit_lm.params import SamplingParams

MAX_MODEL_LEN = 24


def make_core(max_in_flight: int = 1, **options) -> FakeCore:
    return FakeCore(
        VllmConfig.default(max_model_len=MAX_MODEL_LEN, max_num_seqs=4, **options),
        kv_cache(40, [(4, None)]),
        max_in_flight,
    )


@pytest.fixture(params=[1, 2, 3], ids="{} in flight".format)
def core(request):
    return make_core(request.param)


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def good_prompts(count: int) -> list[list[int]]:
    """Prompts whose continuations fail nowhere."""
    found = [prompt for k in range(40) if max(continuation(prompt := [k, k + 1, k], 8)) < NAN]
    return found[:count]


def add(core: FakeCore, request_id: str, prompt: list[int], max_tokens: int = 4, **params) -> None:
    core.add_request(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens, **params),
        )
    )


def steps(core: FakeCore, most: int = 100) -> list[EngineOutputs]:
    """Until nothing is left to do."""
    news = []
    while core.has_unfinished:
        news.append(core.step())
        assert len(news) < most, "requests never end"
    return news


def tokens(news: list[EngineOutputs]) -> dict[str, list[int]]:
    """Sampled tokens, by request id."""
    found: dict[str, list[int]] = {}
    for output in (output for one in news for output in one.outputs):
        found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


def reasons(news: list[EngineOutputs]) -> dict[str, tuple[str, str | None]]:
    """Finish reason and error, by request id."""
    return {
        o.request_id: (o.finish_reason, o.error)
        for one in news
        for o in one.outputs
        if o.finish_reason
    }


class TestLoop:
    def test_tokens_in_tokens_out(self, core):
        prompts = good_prompts(3)
        for number, prompt in enumerate(prompts):
            add(core, str(number), prompt, max_tokens=3 + number)
        news = steps(core)
        assert tokens(news) == {
            str(i): continuation(prompt, 3 + i) for i, prompt in enumerate(prompts)
        }
        assert reasons(news) == {str(i): ("length", None) for i in range(3)}

    def test_each_step_brings_a_token(self):
        core = make_core()
        add(core, "a", good_prompts(1)[0], max_tokens=4)
        assert [len(news.outputs) for news in steps(core)] == [1, 1, 1, 1]

    def test_with_overlap_the_next_step_is_on_its_way(self):
        core = make_core(max_in_flight=2)
        add(core, "a", good_prompts(1)[0], max_tokens=4)
        core.step()
        assert (core.executor.max_in_flight, len(core._in_flight), len(core.executor.plans)) == (
            2,
            1,
            2,
        )

    def test_a_request_that_comes_meanwhile_joins_the_batch(self, core):
        first, second = good_prompts(2)
        add(core, "a", first, max_tokens=6)
        news = [core.step()]
        add(core, "b", second, max_tokens=6)
        news += steps(core)
        assert tokens(news) == {"a": continuation(first, 6), "b": continuation(second, 6)}
        assert any(len(plan.scheduled) == 2 for plan in core.executor.plans)

    def test_what_is_finished_from_outside_gives_nothing_more(self, core):
        first, second = good_prompts(2)
        add(core, "a", first, max_tokens=8)
        add(core, "b", second, max_tokens=8)
        core.step()
        core.finish("a")
        core.finish("unknown")
        news = steps(core)
        assert set(tokens(news)) == {"b"} and reasons(news) == {"b": ("length", None)}
        assert core.scheduler.blocks.num_used == 0

    def test_an_id_in_use(self, core):
        add(core, "a", good_prompts(1)[0])
        with pytest.raises(RequestError, match="'a' is in use"):
            add(core, "a", good_prompts(1)[0])
        assert set(tokens(steps(core))) == {"a"}

    def test_only_steps_are_signs_of_life(self):
        core = make_core()
        idle, core.progress_time = core.progress_time, 0.0
        core.step()
        assert core.progress_time == 0.0
        add(core, "a", good_prompts(1)[0])
        news = core.step()
        assert core.progress_time == news.time > idle

    def test_cached_prefixes_are_forgotten_when_asked(self):
        core = make_core(enable_prefix_caching=True)
        prompt = [5, 6, 5, 6, 5, 6, 5, 6, 5]
        cached = []
        for name in ("first", "cached", "forgotten"):
            if name == "forgotten":
                core.reset_prefix_cache()
            add(core, name, prompt, max_tokens=1)
            cached += [output.num_cached_tokens for news in steps(core) for output in news.outputs]
        assert cached == [0, 8, 0]


class TestRecovery:
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_hiccup_costs_nobody_a_token(self, core, when):
        prompts = good_prompts(3)
        for number, prompt in enumerate(prompts):
            add(core, str(number), prompt, max_tokens=6)
        news = [core.step()]
        core.executor.transient = when
        news += steps(core)
        assert tokens(news) == {str(i): continuation(prompt, 6) for i, prompt in enumerate(prompts)}
        assert core.scheduler.quarantine.quarantined == []

    def test_the_one_to_blame_ends_with_an_error(self, core):
        good, other = good_prompts(2)
        add(core, "good", good, max_tokens=6)
        add(core, "bad", [POISON, 1], max_tokens=6)
        add(core, "other", other, max_tokens=6)
        news = steps(core)
        assert reasons(news) == {
            "good": ("length", None),
            "bad": ("error", "RuntimeError: poisoned"),
            "other": ("length", None),
        }
        assert tokens(news) == {
            "good": continuation(good, 6),
            "bad": [],
            "other": continuation(other, 6),
        }

    def test_those_of_a_failed_step_are_computed_one_by_one(self):
        core = make_core()
        for number, prompt in enumerate(good_prompts(3)):
            add(core, str(number), prompt, max_tokens=6)
        core.step()
        core.executor.transient = "before"
        core.step()
        assert core.scheduler.quarantine.quarantined == ["0", "1", "2"]
        for left in (["1", "2"], ["2"], []):
            core.step()
            assert core.scheduler.quarantine.quarantined == left
            assert len(core.executor.plans[-1].scheduled) == 1
        core.step()
        assert len(core.executor.plans[-1].scheduled) == 3

    def test_one_that_ends_in_quarantine_makes_room(self, core):
        good = good_prompts(1)[0]
        add(core, "first", good, max_tokens=6)
        add(core, "second", good, max_tokens=6)
        core.step()
        core.executor.transient = "before"
        while not core.scheduler.quarantine.quarantined:
            core.step()
        core.finish("first")
        assert core.scheduler.quarantine.quarantined == ["second"]
        assert reasons(steps(core)) == {"second": ("length", None)}

    def test_a_row_that_fails_alone_stops_nobody(self, core):
        good = good_prompts(1)[0]
        add(core, "good", good, max_tokens=6)
        add(core, "bad", [NAN], max_tokens=6)
        num_steps = len(news := steps(core))
        assert reasons(news) == {"good": ("length", None), "bad": ("error", "not a number")}
        assert num_steps <= 7

    def test_it_dies_when_the_warm_up_fails_too(self):
        core = make_core()
        add(core, "bad", [POISON])

        def broken():
            raise RuntimeError("no device")

        core.executor.warm_up = broken
        core.step()
        with pytest.raises(
            EngineDeadError, match="cannot compute anything any more: RuntimeError: poisoned"
        ):
            core.step()

    def test_it_dies_with_a_worker_at_once(self):
        core = make_core(max_in_flight=2)
        add(core, "a", good_prompts(1)[0])
        add(core, "b", good_prompts(1)[0])
        core.executor.death = EngineDeadError("the worker of rank 1 has died: SystemExit")
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="worker of rank 1 has died: SystemExit"):
                core.step()
        assert not core.scheduler.quarantine.quarantined

    def test_it_dies_after_three_failures_in_a_row_without_a_culprit(self):
        core = make_core()
        good = good_prompts(1)[0]
        add(core, "a", good)

        def failing():
            raise MemoryError("no memory")

        core.scheduler.schedule = failing
        core.step()
        core.step()
        with pytest.raises(
            EngineDeadError, match="3 steps in a row have failed: MemoryError: no memory"
        ):
            core.step()

    def test_a_result_in_between_counts_anew(self):
        core = make_core()
        good = good_prompts(1)[0]
        add(core, "a", good, max_tokens=8)
        schedule = core.scheduler.schedule
        failures = iter([True, True, False, True, True, *[False] * 20])

        def sometimes():
            if next(failures):
                raise MemoryError("no memory")
            return schedule()

        core.scheduler.schedule = sometimes
        assert tokens(steps(core)) == {"a": continuation(good, 8)}

    def test_an_interrupt_loses_nothing(self, core):
        good = good_prompts(1)[0]
        add(core, "a", good, max_tokens=6)
        news = [core.step()]
        update = core.scheduler.update

        def interrupted(plan, result):
            raise KeyboardInterrupt

        core.scheduler.update = interrupted
        with pytest.raises(KeyboardInterrupt):
            core.step()
        core.scheduler.update = update
        assert tokens(news + steps(core)) == {"a": continuation(good, 6)}


class TestEvents:
    def test_a_request_s_life(self):
        core = make_core()
        core.poll_outputs()
        add(core, "a", good_prompts(1)[0], max_tokens=2)
        news = steps(core)
        kinds = [
            getattr(event, "kind", type(event).__name__) for one in news for event in one.events
        ]
        queued = ["queued", "LoadEvent"]
        first = ["StepEvent", "scheduled", "first_token", "LoadEvent"]
        last = ["StepEvent", "finished", "LoadEvent"]
        assert kinds == [*queued, *first, *last]
        assert [one.admitted for one in news] == [["a"], []]

    def test_a_step_says_how_much_it_computed(self):
        core = make_core()
        add(core, "a", prompt := good_prompts(1)[0], max_tokens=3)
        sizes = [
            event.num_tokens
            for one in steps(core)
            for event in one.events
            if isinstance(event, StepEvent)
        ]
        assert sizes == [len(prompt), 1, 1]

    def test_the_load_after_each_change(self):
        core = make_core()
        add(core, "a", good_prompts(1)[0], max_tokens=2)
        [waiting] = [event for event in core.poll_outputs().events if isinstance(event, LoadEvent)]
        assert (
            waiting.num_running,
            waiting.num_waiting,
            waiting.num_used_blocks,
            waiting.num_total_blocks,
        ) == (0, 1, 0, 40)
        running = core.step().events[-1]
        assert (running.num_running, running.num_waiting, running.num_used_blocks) == (1, 0, 1)
        ended = core.step().events[-1]
        assert (ended.num_running, ended.num_waiting, ended.num_used_blocks) == (0, 0, 0)

    def test_nobody_listens(self):
        core = make_core()
        core.listening = False
        core.poll_outputs()
        add(core, "a", good_prompts(1)[0], max_tokens=2)
        news = steps(core)
        assert [one.events for one in news] == [[], []]
        # The front's queue needs to know all the same.
        assert [one.admitted for one in news] == [["a"], []]

    @pytest.mark.parametrize("deadline", [False, True])
    def test_what_the_caller_or_the_clock_ends_is_aborted(self, deadline):
        core = make_core()
        message = EngineRequest(
            request_id="a",
            prompt_token_ids=good_prompts(1)[0],
            params=SamplingParams(max_tokens=8),
            deadline=time.monotonic() + (0 if deadline else 60),
        )
        core.add_request(message)
        if not deadline:
            core.finish("a")
        news = core.step()
        [event] = [
            event
            for event in news.events
            if isinstance(event, RequestEvent) and event.kind == "aborted"
        ]
        assert event.finish_reason == ("timeout" if deadline else "abort")
        assert [output.finish_reason for output in news.outputs] == (
            ["timeout"] if deadline else []
        )


class TestStart:
    def make(self, free_memory: int, **options) -> EngineCore:
        config = VllmConfig.default(max_model_len=MAX_MODEL_LEN, max_num_seqs=4, **options)
        executor = FakeExecutor(config, kv_cache(40, [(4, None)]), max_in_flight=1)
        spec = FullSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
        executor.kv_cache_specs = lambda: [{"layer0": spec}]
        executor.backends = lambda: {"layer0": "none"}
        executor.free_memory = lambda: free_memory
        self.phases: list[str] = []
        return EngineCore(config, PLUGINS, executor, on_phase=self.phases.append)

    def test_it_says_what_it_does(self):
        core = self.make(2**20, num_kv_blocks=20)
        assert self.phases == ["loading the model", "warming up"]
        assert core.kv_cache.pools[0].num_blocks == 20

    def test_no_more_blocks_than_all_sequences_can_use(self):
        core = self.make(2**30, num_kv_blocks=10**4, enable_prefix_caching=False)
        assert core.kv_cache.pools[0].num_blocks == 4 * MAX_MODEL_LEN // 4

    def test_a_cache_that_cannot_hold_one_sequence(self):
        with pytest.raises(
            CapacityError,
            match="one sequence of max_model_len 24: it takes 6 blocks, but num_kv_blocks is 5",
        ):
            self.make(2**20, num_kv_blocks=5)

    def test_a_cache_that_takes_more_than_there_is(self):
        with pytest.raises(CapacityError, match="free"):
            self.make(256, num_kv_blocks=20)


@pytest.mark.parametrize("num_had", [0, 1, 3])
def test_a_request_that_another_engine_has_begun_goes_on_where_it_stood(core, num_had):
    """One of its sequences has ended there, and one has some tokens, or none."""
    [prompt] = good_prompts(1)
    expected = continuation(prompt, 6)
    begun = [
        BegunSequence(expected, {}, "length"),
        BegunSequence(expected[:num_had], {"of": {"it": 1.0}}, None),
    ]
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=prompt,
        params=SamplingParams(n=2, max_tokens=6),
        max_output_tokens=6,
        begun=begun,
    )
    EngineCore.add_request(core, request)
    news = steps(core)
    outputs = [output for one in news for output in one.outputs]
    assert {output.index for output in outputs} == {1} and tokens(news) == {"r": expected[num_had:]}
    assert outputs[0].sampler_state == {"of": {"it": 1.0}} and outputs[-1].finish_reason == "length"
    [end] = [
        event
        for one in news
        for event in one.events
        if isinstance(event, RequestEvent) and event.kind == "finished"
    ]
    assert (end.num_sequences, end.num_output_tokens, core.scheduler.blocks.num_used) == (2, 12, 0)
