"""Requests that wait are told why: each reason is reached, counted, and said in events."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from test_scheduler_cases import (
    finish_all,
    lone_good_prompt,
    make_core,
    picture,
    request,
    with_pictures,
)
from toolkit_lm.config import SchedulerConfig, VllmConfig
from toolkit_lm.events import WAITS, RequestEvent
from toolkit_lm.messages import StepPlan
from toolkit_lm.scheduler import SchedulingPolicy

PROMPT = lone_good_prompt(8, 8)


class Closed(SchedulingPolicy):
    """Nobody may begin."""

    def begin_step(self, running, waiting):
        return []


class Stingy(SchedulingPolicy):
    """Who waits is granted nothing."""

    def grant(self, request, budget):
        return 0 if request.request_id == "second" else budget


def begin(core, second=None):
    """One runs, and a second has come."""
    core.add_request(request("first", PROMPT, max_tokens=8))
    core.step()
    core.add_request(second or request("second", PROMPT, max_tokens=8))
    return core


def full_batch():
    return begin(make_core(max_num_seqs=1))


def behind_another():
    core = full_batch()
    core.add_request(request("third", PROMPT, max_tokens=8))
    core.finish("second")
    core.add_request(request("second", PROMPT, max_tokens=8))
    return core


def few_tokens():
    return begin(make_core(max_num_batched_tokens=8, enable_chunked_prefill=False))


def few_blocks():
    return begin(make_core(4, enable_prefix_caching=False))


def full_media_cache():
    core = make_core(max_num_batched_tokens=6)
    core.scheduler.items.capacity = 2
    core.add_request(with_pictures("first", PROMPT, picture("a", 2, 2), max_tokens=8))
    core.step()
    core.scheduler.items._held["first"] = {"a": 2}
    core.add_request(with_pictures("second", PROMPT, picture("b", 0, 2), max_tokens=8))
    return core


def still_drawing():
    core = begin(make_core(max_in_flight=2))
    core.step()
    running = core.scheduler.roster.requests["second"]
    core.scheduler._preempt(StepPlan(), running)
    return core


def with_policy(policy):
    def make():
        core = make_core()
        begin(core)
        core.scheduler.policy = policy(SchedulerConfig())
        return core

    return make


CASES = {
    "batch": [full_batch],
    "queue": [behind_another],
    "tokens": [few_tokens],
    "blocks": [few_blocks],
    "media": [full_media_cache],
    "drawing": [still_drawing],
    "policy": [with_policy(Closed), with_policy(Stingy)],
}
ELSEWHERE = {"part", "loading"}
"""Reasons of parts, and of what loads keys and values: tested with them."""


def test_every_reason_has_a_case():
    assert CASES.keys() | ELSEWHERE == WAITS.keys()


def test_every_option_that_a_reason_names_is_one():
    known = {option.name for option in VllmConfig.options()}
    named = {name for text in WAITS.values() for name in re.findall(r"[a-z]+_\w+", text)}
    assert named and named <= known


@pytest.mark.parametrize(
    ("reason", "make"), [(reason, make) for reason, makes in CASES.items() for make in makes]
)
def test_a_request_that_waits_says_why(reason, make):
    core = make()
    core.scheduler.schedule()
    roster = core.scheduler.roster
    second = roster.requests["second"]
    assert second in roster.waiting
    assert (second.waits.reason, str(second.waits)) == (reason, WAITS[reason])
    assert +roster.waits == Counter(one.waits.reason for one in roster.waiting)
    core.finish("second")
    events = [one for one in core.poll_outputs().events if isinstance(one, RequestEvent)]
    assert events[-1].waited_for == WAITS[reason]
    assert +roster.waits == Counter(one.waits.reason for one in roster.waiting)


def test_the_load_counts_those_who_wait_by_reason():
    core = full_batch()
    core.add_request(request("third", PROMPT, max_tokens=8))
    load = core.step().events[-1]
    assert (load.num_waiting, load.waiting_by_reason) == (2, {"batch": 1, "queue": 1})
    finish_all(core)
    core.add_request(request("last", PROMPT, max_tokens=1))
    assert core.step().events[-1].waiting_by_reason == {}
