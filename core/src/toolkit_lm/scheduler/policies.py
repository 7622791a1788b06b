"""Scheduling policies: in which order requests are served."""

from __future__ import annotations

import math
from collections.abc import Callable

from toolkit_lm.errors import RequestError
from toolkit_lm.plugin import SchedulingPolicyRegistry
from toolkit_lm.scheduler.request import Request

SchedulingPolicy = Callable[[Request], tuple[float, ...]]
"""Sort key of a request that arrives, asked once: the smallest is served first, the largest is preempted first, and of equals the first
that came is served first.

It may read the request's `priority`, `num_prompt_tokens`, `max_output_tokens`, `arrival_time`, `deadline`, `params` and `context`.
"""


def fcfs(request: Request) -> tuple[float, ...]:
    """First come, first served."""
    return ()


def priority(request: Request) -> tuple[float, ...]:
    """The smaller number first."""
    return (request.priority,)


def load_policy(registry: SchedulingPolicyRegistry, name: str) -> SchedulingPolicy:
    """The registered policy; where it fails on a request, it raises RequestError, which names the plugin.

    Raises ConfigError for an unknown name, PluginError for one that cannot be imported.
    """
    policy, owner = registry.load(name), registry.get(name).owner

    def sort_key(request: Request) -> tuple[float, ...]:
        try:
            key = tuple(policy(request))
            if any(map(math.isnan, key)):
                raise ValueError(f"its key is {key}")
            return key
        except Exception as error:
            raise RequestError(f"scheduling policy {name!r} of {owner} failed: {type(error).__name__}: {error}") from error

    return sort_key
