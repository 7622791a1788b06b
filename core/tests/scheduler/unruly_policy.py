"""A scheduling policy without rhyme or reason, which every scheduler must bear with."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from toolkit_lm.config import SchedulerConfig
from toolkit_lm.plugin import SchedulingPolicyRegistry, hookimpl
from toolkit_lm.scheduler import Request, SchedulingPolicy


class UnrulyPolicy(SchedulingPolicy):
    """Draws by lot whom a step leaves out or cuts short, who overtakes whom, and who gives way."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._draws = Random(len("unruly"))
        self._asked = 0

    def begin_step(
        self, running: Sequence[Request], waiting: Sequence[Request]
    ) -> Sequence[Request]:
        """If no request runs, the first waiting one may be admitted."""
        self._asked = 0
        return [
            one
            for one in waiting
            if (one is waiting[0] and not running) or self._draws.random() < 0.8
        ]

    def grant(self, request: Request, budget: int) -> int:
        """The first that is asked for always gets on."""
        self._asked += 1
        return (
            budget
            if self._asked == 1
            else self._draws.choice([0, 1, budget, self._draws.randint(0, budget)])
        )

    def overtakes(self, request: Request, other: Request) -> bool:
        return self._draws.random() < 0.5

    def gives_way(self, request: Request, running: Sequence[Request]) -> Request | None:
        able = [one for one in running if not one.gave_way]
        return self._draws.choice([*able, running[-1] if request is running[0] else None])


@hookimpl
def register(policies: SchedulingPolicyRegistry) -> None:
    policies.add("unruly", f"{__name__}:UnrulyPolicy")
