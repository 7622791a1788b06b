"""Planners of parts: whom they let begin, what they tell and hear, and what becomes of those that
fail."""

from __future__ import annotations

import time

import pytest
from msgspec import Raw, msgpack
from test_scheduler_cases import continuation, finish_all, lone_good_prompt, make_core, request
from toolkit_lm.engine.core import REST
from toolkit_lm.engine.in_process import InProcessClient
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import SequenceInputs
from toolkit_lm.plugin import PluginInfo
from toolkit_lm.scheduler import Planner

PROMPT = lone_good_prompt(6, 12)
NAME = "slots"


class Slots(Planner):
    """Adapters, of which the worker holds so many, and which it loads in its own time."""

    def __init__(self, num_slots=1, delay=0):
        self.num_slots = num_slots
        self.delay = delay
        self.users = {}
        self.loading = {}
        self.loaded = set()
        self.told = []

    def may_begin(self, request, tokens):
        name = adapter(request)
        if name is None or name in self.loaded:
            return None
        if name in self.loading:
            return "is loading"
        if len(self.users) + len(self.loading) >= self.num_slots:
            return "no slot"
        self.loading[name] = self.delay
        self.told.append(name)
        return "is loading"

    def begin(self, plan, request):
        if (name := adapter(request)) is not None:
            self.users[request.request_id] = name

    def release(self, request_id):
        name = self.users.pop(request_id, None)
        if name is not None and name not in self.users.values():
            self.loaded.discard(name)

    def end_step(self):
        told, self.told = self.told, []
        return Raw(msgpack.encode(told)) if told else None

    def awaits(self):
        return bool(self.loading)

    def update(self, result):
        for name in msgpack.decode(result):
            del self.loading[name]
            self.loaded.add(name)

    def reset(self, plans):
        self.users.clear()
        self.loading.clear()
        self.loaded.clear()
        self.told.clear()


def adapter(request):
    share = request.inputs.parts.get(NAME)
    return None if share is None else msgpack.decode(share)


def core_with(planner, name=NAME, **options):
    """Its worker has loaded an adapter some steps after it was told to."""
    core = make_core(**options)
    core.scheduler.planners._owners = {name: PluginInfo("loras", "acme-loras", "2.5")}
    core.scheduler.planners.add(name, planner)
    core.scheduler.request_blocks.watch()
    execute = core.executor.execute
    loading: dict[str, int] = {}

    def with_answers(plan):
        for adapter in msgpack.decode(plan.parts.get(NAME, b"\x90")):
            loading[adapter] = getattr(planner, "delay", 0)
        done = [one for one, left in loading.items() if left == 0]
        for one in list(loading):
            loading[one] -= 1
            if one in done:
                del loading[one]
        future = execute(plan)
        if done and future.exception() is None:
            future.result().parts[NAME] = Raw(msgpack.encode(done))
        return future

    core.executor.execute = with_answers
    return core


def ask(core, request_id, share=None, **params):
    asked = request(request_id, PROMPT, **{"max_tokens": 4, "ignore_eos": True} | params)
    if share is not None:
        asked.inputs = SequenceInputs(parts={NAME: Raw(msgpack.encode(share))})
    core.add_request(asked)
    return asked


def tokens_of(outputs):
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("delay", [0, 3])
def test_requests_wait_for_slots_and_others_go_on(delay, max_in_flight):
    core = core_with(Slots(delay=delay), max_in_flight=max_in_flight)
    for request_id, share in (("a", "x"), ("b", "y"), ("c", None), ("d", "x")):
        ask(core, request_id, share)
    first = [one for one in core.step().outputs if one.request_id == "c"]
    roster = core.scheduler.roster
    assert str(roster.requests["b"].waits) == "slots: no slot"
    assert roster.requests["b"].waits.reason == "part"
    # Who needs no slot does not wait for one.
    assert roster.requests["c"] in roster.running
    outputs = finish_all(core)
    outputs["c"] = first + outputs["c"]
    assert {one: tokens_of(its) for one, its in outputs.items()} == dict.fromkeys(
        "abcd", continuation(PROMPT, 4)
    )
    assert not core.scheduler.planners.by_name[NAME].users


def test_part_work_alone_makes_a_step_and_its_answer_arrives():
    core = core_with(Slots(delay=3))
    ask(core, "a", "x")
    core.step()
    assert [plan.parts.keys() for plan in core.executor.plans] == [{NAME}]
    assert not core.executor.plans[0].scheduled
    assert tokens_of(finish_all(core)["a"]) == continuation(PROMPT, 4)


def test_a_part_is_heard_when_no_request_runs():
    core = core_with(planner := Slots(delay=2))
    ask(core, "a", "x")
    core.step()
    core.finish("a")
    assert core.has_unfinished, "the answer is to come"
    for _ in range(5):
        core.step()
    assert planner.loaded == {"x"} and not core.has_unfinished


def client_of(core):
    client = object.__new__(InProcessClient)
    client.core = core
    from queue import SimpleQueue

    client._wakes = SimpleQueue()
    return client


@pytest.mark.parametrize("delay", [5, 10**9])
def test_who_waits_for_a_part_neither_spins_nor_sleeps_for_ever(delay):
    core = core_with(Slots(delay=delay))
    ask(core, "a", "x")
    client = client_of(core)
    start = time.monotonic()
    num_steps = 0
    while core.has_unfinished and num_steps < 60:
        client.step()
        num_steps += 1
    assert core.has_unfinished == (delay > 5)
    if delay > 5:
        assert time.monotonic() - start > 60 * REST / 2, "it spins"


class Refuses(Planner):
    """Nothing will ever begin, and nothing is awaited."""

    def __init__(self):
        pass

    def may_begin(self, request, tokens):
        return "never"


def test_who_waits_for_nothing_does_not_spin():
    core = core_with(Refuses())
    ask(core, "a")
    client = client_of(core)
    start = time.monotonic()
    for _ in range(20):
        client.step()
    assert time.monotonic() - start > 0.05
    core.finish("a")


def failing(method):
    def boom(self, *arguments):
        asked = [one for one in arguments if hasattr(one, "inputs")]
        if method not in ABOUT_ONE or any(adapter(one) for one in asked):
            raise KeyError("boom")
        return DEFAULTS[method](self, *arguments)

    # It is asked for an end only where it has a say in ranges.
    says = {"fit": lambda self, request, ranges: ranges}
    return type("Failing", (Slots,), says | {method: boom})(num_slots=2, delay=8)


ABOUT_ONE = {"may_begin", "begin", "end_of", "fit", "commit"}
"""Methods that are asked about one request."""
ALL = sorted(name for name in vars(Planner) if name[0] != "_")
DEFAULTS = {name: getattr(Slots, name) for name in ALL}


@pytest.mark.parametrize("method", ALL)
def test_a_planner_that_fails_is_named_and_others_go_on(method):
    core = core_with(failing(method))
    errors = []
    for request_id, share in (("a", "x"), ("b", None)):
        try:
            ask(core, request_id, share)
        except RequestError as error:
            errors.append(str(error))
    if method == "reset":
        core._reset_after_failure()
    if method == "forgotten":
        core.reset_prefix_cache()
    outputs = finish_all(core)
    assert tokens_of(outputs["b"]) == continuation(PROMPT, 4)
    errors += [one.error for one in outputs.get("a", ()) if one.error]
    if method == "close":
        core.shutdown()
    if method in ("release", "close"):
        # It fails as the first request ends, which is in vain by then.
        with pytest.raises(RequestError) as caught:
            ask(core, "c", "x")
        errors = [str(caught.value)]
    assert len(errors) == 1
    assert "plugin 'loras' (acme-loras 2.5" in errors[0]
    assert "failed in the planner of part 'slots': KeyError: 'boom'" in errors[0]


class Narrow(Planner):
    """A step computes at most two tokens of a prompt with a share."""

    def __init__(self):
        self.committed = []

    def end_of(self, request):
        return request.num_prompt_tokens if request.inputs.parts else 0

    def fit(self, request, ranges):
        return [one._replace(end=min(one.end, one.start + 2)) for one in ranges]

    def commit(self, plan, request, ranges):
        self.committed += [one.end - one.start for one in ranges]


def test_planners_cut_ranges_up_to_the_end_that_they_say():
    core = core_with(planner := Narrow())
    ask(core, "a", "x")
    ask(core, "b")
    outputs = finish_all(core)
    assert {one: tokens_of(its) for one, its in outputs.items()} == dict.fromkeys(
        "ab", continuation(PROMPT, 4)
    )
    assert set(planner.committed) <= {1, 2}


class Watching(Planner):
    """The contents that it was told of."""

    def __init__(self, fails=False):
        self.fails = fails
        self.contents = set()
        self.tokens = {}
        self.is_closed = False

    def stored(self, seq, group, indices):
        if self.fails:
            raise ValueError("no disk")
        for index in indices:
            digest = seq.block_hashes(group.size, index + group.later + 1)[index + group.later]
            assert (group.index, digest) not in self.contents
            self.contents.add((group.index, digest))
            self.tokens[digest] = seq.token_ids[index * group.size : (index + 1) * group.size]
            assert len(self.tokens[digest]) == group.size

    def forgotten(self, content):
        if content is None:
            self.contents.clear()
        else:
            self.contents.discard(content)

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("groups", [((4, None),), ((4, None), (4, 8)), ((2, None), (8, None))])
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_contents_of_blocks_are_watched(groups, max_in_flight, preemption_mode):
    """Through evictions, preemptions, forks, aborts and resets: always those that are found."""
    planner = Watching()
    core = core_with(
        planner,
        num_blocks=16 * len(groups),
        groups=groups,
        max_in_flight=max_in_flight,
        num_host_blocks=16,
        preemption_mode=preemption_mode,
    )
    pools = core.scheduler.blocks.pools

    def check():
        assert planner.contents == {key for pool in pools for key in pool._blocks}

    evicted = 0
    for turn in range(12):
        for number in range(3):
            prompt = lone_good_prompt((turn + number) % 5 + 6, 12)
            core.add_request(
                request(f"{turn} {number}", prompt, max_tokens=9, n=number + 1, ignore_eos=True)
            )
        before = set(planner.contents)
        for step in range(60):
            if not core.has_unfinished:
                break
            core.step()
            check()
            if step == 2:
                core.finish(f"{turn} 1")
                check()
        evicted += len(before - planner.contents)
        if turn == 5:
            core.reset_prefix_cache()
            assert not planner.contents
        if turn == 8:
            core.start_over()
            assert not planner.contents
    assert planner.contents and evicted
    core.shutdown()
    assert planner.is_closed


def test_a_watcher_that_fails_is_dropped_alone():
    core = core_with(Watching(fails=True))
    ask(core, "a")
    assert tokens_of(finish_all(core)["a"]) == continuation(PROMPT, 4)
    assert "no disk" in core.scheduler.planners.dropped[NAME]
    assert NAME not in core.scheduler.planners.by_name


def test_without_watchers_nothing_is_told():
    core = make_core()
    assert core.scheduler.blocks.on_published is None
    assert all(pool.on_forgotten is None for pool in core.scheduler.blocks.pools)
