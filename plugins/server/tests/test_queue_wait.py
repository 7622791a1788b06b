"""The estimated wait of a new request, from the engine's events."""

from __future__ import annotations

import pytest
from toolkit_lm.events import LoadEvent, RequestEvent
from toolkit_lm_server import queue_wait
from toolkit_lm_server.metrics import Metrics


class Clock:
    """Stands in for `time`."""

    def __init__(self, now: float) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock(100.0)
    monkeypatch.setattr(queue_wait, "time", made)
    return made


def load(num_waiting: int, engine: int = 0) -> LoadEvent:
    return LoadEvent(
        time=0.0,
        num_running=1,
        num_waiting=num_waiting,
        num_used_blocks=0,
        num_total_blocks=10,
        engine=engine,
    )


def scheduled() -> RequestEvent:
    return RequestEvent(
        kind="scheduled", request_id="x", time=0.0, arrival_time=0.0, num_prompt_tokens=1
    )


def test_those_that_wait_by_the_pace_since_they_wait(clock):
    metrics = Metrics()
    wait = metrics.queue_wait
    assert wait.seconds() == 0.0
    # No request waits yet: these do not count.
    for _ in range(9):
        metrics.toolkit_event(scheduled())
    metrics.toolkit_event(load(2))
    metrics.toolkit_event(load(1, engine=1))
    assert wait.seconds() == 0.0
    clock.now += 4
    for _ in range(5):
        metrics.toolkit_event(scheduled())
    # 5 in 4 seconds, and one that must come.
    assert wait.seconds() == pytest.approx(3 * 4 / 6)
    wait.num_elsewhere = 3.0
    assert wait.seconds() == pytest.approx(6 * 4 / 6)
    wait.num_elsewhere = 0.0
    metrics.toolkit_event(load(0))
    metrics.toolkit_event(load(0, engine=1))
    # Nobody has asked meanwhile: the pace begins anew all the same.
    clock.now += 5
    metrics.toolkit_event(load(4))
    assert wait.seconds() == 0.0


def test_a_wait_that_lasts_is_of_the_latest_pace(clock):
    metrics = Metrics()
    metrics.toolkit_event(load(4))
    waits = []
    for second in range(120):
        clock.now = 100.0 + second
        if second < 60:
            for _ in range(10):
                metrics.toolkit_event(scheduled())
        waits.append(metrics.queue_wait.seconds())
    assert waits[50] == pytest.approx(0.4, abs=0.1)
    assert waits[-1] > 10
