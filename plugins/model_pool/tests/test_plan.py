"""Which model is loaded, and which ones make room."""

from __future__ import annotations

import random
from types import SimpleNamespace

import msgspec
import pytest
from toolkit_lm.config import VllmConfig
from toolkit_lm_model_pool.entries import Group, made_entry
from toolkit_lm_model_pool.model import PooledModel, settings_of
from toolkit_lm_model_pool.plan import make_plan
from toolkit_lm_server.options import ServerOptions


def model(name, size, state="cold", *, waits=None, busy=0, ready=0.0, pin=False, uses=0):
    made = made_entry(name)
    entry = type(made)(name=name, pin=pin)
    pooled = PooledModel(entry, settings_of(entry, VllmConfig.make(), ServerOptions(), None))
    pooled.measured = size
    pooled.state = state
    pooled.in_flight = busy
    pooled.ready_since = ready
    pooled.load_seconds = 1.0
    for _ in range(uses):
        pooled.used(99.0)
    if waits is not None:
        pooled.waiters.append((waits, SimpleNamespace()))
    return pooled


def planned(*models, budget=10, turn=2.0, now=100.0):
    plan = make_plan(models, budget, turn, now)
    return tuple("".join(one.name for one in part) for part in (plan.load, plan.evict, plan.leave))


def test_what_fits_is_loaded_in_the_order_of_arrival():
    assert planned(model("a", 6, waits=3.0), model("b", 4, waits=2.0)) == ("ba", "", "")
    assert planned(model("a", 6, waits=3.0), model("b", 5, waits=2.0))[0] == "b"
    assert planned(model("a", 6), model("b", 5)) == ("", "", "")


def test_the_idle_one_of_least_worth_makes_room():
    rare = model("r", 5, "ready", uses=1)
    often = model("o", 5, "ready", uses=5)
    assert planned(rare, often, model("n", 5, waits=1.0)) == ("", "r", "")
    often.load_seconds = 0.1
    assert planned(rare, often, model("n", 5, waits=1.0)) == ("", "o", "")
    # A larger one needs both.
    assert set(planned(rare, often, model("n", 9, waits=1.0))[1]) == {"r", "o"}


def test_pinned_running_and_new_ones_stay():
    new = model("n", 5, waits=1.0)
    assert planned(model("p", 10, "ready", pin=True), new) == ("", "", "")
    assert planned(model("y", 10, "ready", ready=99.0), new) == ("", "", "")
    assert planned(model("b", 10, "ready", busy=1, ready=99.0), new) == ("", "", "")
    assert planned(model("l", 10, "loading"), new) == ("", "", "")


def test_a_busy_one_that_had_its_turn_takes_no_new_requests_and_then_goes():
    busy = model("b", 10, "ready", busy=1)
    new = model("n", 5, waits=1.0)
    assert planned(busy, new) == ("", "", "b")
    busy.leaving = True
    busy.waiters.append((50.0, SimpleNamespace()))
    busy.in_flight = 0
    assert planned(busy, new) == ("", "b", "")
    # It comes back in its turn: the other one has been served longer.
    busy.state = "cold"
    new.waiters.clear()
    new.state = "ready"
    new.in_flight = 1
    assert planned(busy, new, now=102.0) == ("", "", "n")


def test_nothing_is_evicted_in_vain():
    """What is free after all evictions would not do."""
    models = [
        model("i", 4, "ready"),
        model("y", 6, "ready", ready=99.0),
        model("n", 9, waits=1.0),
    ]
    assert planned(*models) == ("", "", "")


def test_a_later_one_takes_only_what_the_first_leaves():
    running = model("r", 6, "ready", busy=1)
    first = model("f", 8, waits=1.0)
    assert planned(running, first, model("s", 2, waits=2.0)) == ("s", "", "r")
    assert planned(running, first, model("s", 3, waits=2.0)) == ("", "", "r")


def test_one_that_can_never_fit_keeps_nobody():
    pinned = model("p", 4, "ready", pin=True)
    assert planned(pinned, model("x", 7, waits=1.0), model("s", 3, waits=2.0)) == ("s", "", "")


def test_room_that_is_coming_is_counted():
    going = model("g", 10, "unloading")
    idle = model("i", 0, "ready")
    assert planned(going, idle, model("n", 9, waits=1.0)) == ("", "", "")


def test_a_failed_one_waits_for_its_time():
    failed = model("f", 5, "failed", waits=1.0)
    failed.retry_at = 101.0
    assert planned(failed) == ("", "", "")
    assert planned(failed, now=101.5) == ("f", "", "")


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_exceeds_the_budget_and_nobody_starves(seed):
    """A random course: everybody is served in the end, and the sum never exceeds the budget."""
    rng = random.Random(seed)
    models = [model(f"m{number}", rng.randint(1, 10)) for number in range(6)]
    served = dict.fromkeys((one.name for one in models), 0)
    for now in range(2000):
        for one in models:
            if rng.random() < 0.3 and now < 300:
                one.waiters.append((float(now), SimpleNamespace()))
            if one.state == "ready" and not one.leaving:
                served[one.name] += len(one.waiters)
                one.in_flight += len(one.waiters)
                one.waiters.clear()
            if one.in_flight and rng.random() < 0.5:
                one.in_flight -= 1
            if one.state == "unloading":
                one.state = "cold"
                one.leaving = False
            if one.state == "loading":
                one.state = "ready"
                one.ready_since = float(now)
        plan = make_plan(models, 10, 2.0, float(now))
        for one in models:
            one.leaving = one in plan.leave
        for one in plan.evict:
            assert one.in_flight == 0
            one.state = "unloading"
        for one in plan.load:
            one.state = "loading"
        assert sum(one.holds for one in models) <= 10
    assert all(served.values())
    assert not any(one.waiters for one in models)


def sleeper(name, size, rest, state="ready", **more):
    """A model that sleeps where another would be unloaded, and takes `rest` bytes then."""
    pooled = model(name, size, state, **more)
    fields = {field: getattr(pooled.entry, field) for field in pooled.entry.__struct_fields__}
    pooled.entry = type(pooled.entry)(**{**fields, "idle": "sleep"})
    pooled._asleep[2] = rest
    pooled.sleep_level = 2 if state == "asleep" else 0
    return pooled


def put(*models, budget=10):
    plan = make_plan(models, budget, 2.0, 100.0)
    return tuple("".join(one.name for one in part) for part in (plan.load, plan.sleep, plan.evict))


def test_one_sleeps_where_that_makes_enough_room():
    new = model("n", 7, waits=1.0)
    assert put(sleeper("s", 10, 3), new) == ("", "s", "")
    assert put(sleeper("s", 10, 4), new) == ("", "", "s")
    # A sleeping one takes its rest, and goes where more is needed.
    assert put(sleeper("s", 10, 3, "asleep"), new) == ("n", "", "")
    assert put(sleeper("s", 10, 4, "asleep"), new) == ("", "", "s")


def test_no_more_sleep_or_go_than_must():
    new = model("n", 9, waits=1.0)
    rare = sleeper("r", 10, 8, uses=1)
    often = sleeper("o", 10, 8, uses=5)
    assert put(rare, often, new, budget=20) == ("", "", "r")
    # One whose sleep would not be needed stays awake.
    small = sleeper("s", 2, 1, uses=1)
    assert put(small, sleeper("b", 9, 1, uses=5), model("n", 8, waits=1.0), budget=11) == (
        "",
        "b",
        "",
    )


def test_one_that_wakes_up_needs_what_it_has_not_yet():
    assert put(sleeper("s", 10, 4, "asleep", waits=1.0)) == ("s", "", "")
    running = model("r", 2, "ready", busy=1)
    assert put(sleeper("s", 10, 4, "asleep", waits=1.0), running, budget=11) == ("", "", "")
    idle = model("i", 2, "ready")
    assert put(sleeper("s", 10, 4, "asleep", waits=1.0), idle, budget=11) == ("", "", "i")


def test_one_that_cannot_wake_up_within_the_budget_is_loaded_anew():
    """Its weights are there twice while it wakes up."""
    asleep = sleeper("s", 8, 4, "asleep", waits=1.0)
    asleep.need = SimpleNamespace(weights=3, total=8, process=1)
    assert put(asleep) == ("", "", "s")
    asleep.need.weights = 2
    assert put(asleep) == ("s", "", "")
    # From a file they are copied into their place.
    asleep.need.weights = 3
    asleep.keeps_weights = True
    assert put(asleep) == ("s", "", "")


@pytest.mark.parametrize("seed", range(20))
def test_sleepers_stay_in_the_budget_and_nobody_starves(seed):
    rng = random.Random(seed)
    models = []
    for number in range(6):
        size = rng.randint(2, 10)
        sleeps = rng.random() < 0.6
        models.append(
            sleeper(f"m{number}", size, max(size // 4, 1), "cold")
            if sleeps
            else model(f"m{number}", size)
        )
    served = dict.fromkeys((one.name for one in models), 0)
    slept = 0
    for now in range(2000):
        for one in models:
            if rng.random() < 0.3 and now < 300:
                one.waiters.append((float(now), SimpleNamespace()))
            if one.state == "ready" and not one.leaving:
                served[one.name] += len(one.waiters)
                one.in_flight += len(one.waiters)
                one.waiters.clear()
            if one.in_flight and rng.random() < 0.5:
                one.in_flight -= 1
            if one.state == "unloading":
                one.state = "asleep" if one.falling else "cold"
                one.sleep_level = one.falling
                one.falling = 0
                one.leaving = False
            if one.state == "loading":
                one.state = "ready"
                one.sleep_level = 0
                one.ready_since = float(now)
        plan = make_plan(models, 10, 2.0, float(now))
        changed = [*plan.load, *plan.sleep, *plan.evict, *plan.leave]
        assert len({one.name for one in changed}) == len(changed)
        for one in models:
            one.leaving = one in plan.leave
        for one in (*plan.sleep, *plan.evict):
            assert one.in_flight == 0
            one.state = "unloading"
        for one in plan.sleep:
            one.falling = 2
            slept += 1
        for one in plan.load:
            one.state = "loading"
        assert sum(one.holds for one in models) <= 10
    assert all(served.values()) and slept
    assert not any(one.waiters for one in models)


def grouped(*models, **rules):
    """The models, in one group."""
    group = Group(members=[one.name for one in models], **rules)
    for one in models:
        one.entry = msgspec.structs.replace(one.entry, group=group)
    return models


def test_one_member_of_a_swapping_group_is_loaded_at_a_time():
    loaded, other = grouped(model("a", 1, "ready"), model("b", 1, waits=1.0), exclusive=False)
    assert put(loaded, other) == ("", "", "a")
    assert planned(loaded, other, now=1.0) == ("", "", "")
    loaded.in_flight = 1
    assert planned(loaded, other) == ("", "", "a")
    loaded.in_flight = 0
    loaded.state = "loading"
    assert put(loaded, other) == ("", "", "")
    grouped(loaded, other, swap=False, exclusive=False)
    assert put(loaded, other) == ("b", "", "")


def test_a_member_that_may_sleep_does_and_its_sleep_is_no_hindrance():
    awake, other = grouped(sleeper("a", 2, 1), model("b", 1, waits=1.0))
    assert put(awake, other) == ("", "a", "")
    awake.state = "asleep"
    awake.sleep_level = 2
    assert put(awake, other) == ("b", "", "")


def test_an_exclusive_group_has_others_unloaded_but_for_persistent_and_pinned_ones():
    [new] = grouped(model("n", 1, waits=1.0))
    [kept] = grouped(model("k", 1, "ready"), persistent=True)
    [other] = grouped(model("o", 1, "ready"), exclusive=False)
    free = model("f", 1, "ready")
    pinned = model("p", 1, "ready", pin=True)
    assert put(new, kept, other, free, pinned) == ("", "", "of")
    assert put(new, kept, pinned) == ("n", "", "")
    # Those of other groups come back beside it, where their own groups allow it.
    new.waiters.clear()
    new.state = "ready"
    free.state = "cold"
    free.waiters.append((1.0, SimpleNamespace()))
    assert put(new, free) == ("f", "", "")
    [alone] = grouped(model("a", 1, waits=1.0))
    assert put(new, alone) == ("", "", "n")


def test_a_persistent_member_makes_no_room_for_others_and_holds_up_nobody():
    [kept] = grouped(model("k", 6, "ready"), persistent=True)
    assert put(kept, model("n", 5, waits=1.0), model("s", 4, waits=2.0)) == ("s", "", "")
    first, second = grouped(model("k", 6, "ready"), model("n", 5, waits=1.0), persistent=True)
    assert put(first, second) == ("", "", "k")


def test_whoever_waits_for_a_group_is_not_passed_by_those_that_it_excludes():
    running = model("r", 1, "ready", busy=1)
    [new] = grouped(model("n", 1, waits=1.0))
    assert planned(running, new, model("o", 1, waits=2.0)) == ("", "", "r")


@pytest.mark.parametrize("seed", range(20))
def test_groups_hold_and_nobody_starves(seed):
    rng = random.Random(seed)
    models = [model(f"m{number}", rng.randint(1, 4)) for number in range(6)]
    grouped(*models[:2], swap=True, exclusive=rng.random() < 0.5)
    grouped(*models[2:4], swap=False, exclusive=rng.random() < 0.5, persistent=rng.random() < 0.5)
    served = dict.fromkeys((one.name for one in models), 0)
    for now in range(3000):
        for one in models:
            if rng.random() < 0.3 and now < 300:
                one.waiters.append((float(now), SimpleNamespace()))
            if one.state == "ready" and not one.leaving:
                served[one.name] += len(one.waiters)
                one.in_flight += len(one.waiters)
                one.waiters.clear()
            if one.in_flight and rng.random() < 0.5:
                one.in_flight -= 1
            if one.state == "unloading":
                one.state = "cold"
                one.leaving = False
            if one.state == "loading":
                one.state = "ready"
                one.ready_since = float(now)
        plan = make_plan(models, 20, 2.0, float(now))
        for one in models:
            one.leaving = one in plan.leave
        for one in plan.evict:
            assert one.in_flight == 0
            one.state = "unloading"
        for one in plan.load:
            one.state = "loading"
        held = [one for one in models if one.holds]
        assert sum(one.holds for one in held) <= 20
        assert len([one for one in held if one in models[:2]]) < 2
    assert all(served.values())
    assert not any(one.waiters for one in models)
