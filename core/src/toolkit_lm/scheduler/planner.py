"""Planner: the half of a part that decides, in the scheduler, what a step holds of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Collection
from typing import TYPE_CHECKING, Any

from msgspec import Raw

from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import StepPlan

if TYPE_CHECKING:
    from toolkit_lm.kv.block_manager import TokenRange
    from toolkit_lm.scheduler.request import Request


class Planner:
    """One per engine, called from its thread. This base does nothing; only methods that a subclass
    defines are called. Its module imports no torch.

    It accounts for what the worker's half holds, and tells that half by `plan.parts[name]`, which
    is sent as it is. A request's share of the part is `request.inputs.parts.get(name)`.
    """

    def __init__(self, config: VllmConfig, facts: Raw, *, options: Any) -> None:
        """`config` is resolved. `facts`: what the worker's half said of itself, as msgpack; nil
        where there is none. `options`: the plugin's own, or None."""

    def may_begin(self, request: Request, tokens: TokenRange) -> str | None:
        """Whether a request that waits may begin with these tokens of its first sequence: None, or
        why it waits on, such as "no slot"."""
        return None

    def fit(self, request: Request, ranges: Collection[TokenRange]) -> list[TokenRange]:
        """What of these ranges the next step can compute. An end may come earlier; a range that
        would be empty is left out."""
        return list(ranges)

    def commit(self, plan: StepPlan, request: Request, ranges: Collection[TokenRange]) -> None:
        """The step computes these ranges, which `fit`. Takes what they need, and may write
        `plan.parts`."""

    def release(self, request_id: str) -> None:
        """A request has ended, or waits again. Called for those too that held nothing."""

    def end_step(self) -> Raw | None:
        """A step is planned. Returns what the worker's half is told of all of it, which becomes
        `plan.parts[name]`; None: nothing more. Something to tell makes a step, without rows too."""
        return None

    def update(self, result: Raw) -> None:
        """The worker's half has answered: `result.parts[name]` of a step, in the order of the
        plans."""

    def reset(self, plans: Iterable[StepPlan]) -> None:
        """Steps have failed: nothing that these plans brought to the worker can be relied on. All
        requests wait, and hold nothing."""
