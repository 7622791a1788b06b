"""Scheduling policies: in which order requests are served, and so which one gives way when blocks run out."""

from __future__ import annotations

from collections.abc import Callable

from toolkit_lm.scheduler.request import Request

SchedulingPolicy = Callable[[Request], tuple[float, ...]]
"""Sort key of a request: the smallest is served first, the largest is preempted first. Constant while the request lives."""


def fcfs(request: Request) -> tuple[float, ...]:
    """First come, first served."""
    return (request.arrival_time, request.number)


def priority(request: Request) -> tuple[float, ...]:
    """The smaller number first; among equals, first come, first served."""
    return (request.priority, request.arrival_time, request.number)


POLICIES: dict[str, SchedulingPolicy] = {"fcfs": fcfs, "priority": priority}
