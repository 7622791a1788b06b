"""The parts of a runner's steps: which there are, and which of their methods are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Raw

from toolkit_lm.config import VllmConfig
from toolkit_lm.step import StepPart


class StepParts:
    """Holds parts by name. Of each method there is a list of those that override it, so that what a
    part leaves out costs a step nothing."""

    def __init__(self) -> None:
        self.by_name: dict[str, StepPart] = {}
        self._list()

    def _list(self) -> None:
        self.add = self._overridden("add")
        self.remove = self._overridden("remove")
        self.begin = self._named("begin")
        self.groups = self._overridden("groups")
        self.inputs = self._overridden("inputs")
        self.finish = self._named("finish")

    def _named(self, method: str) -> list[tuple[str, Callable[..., Any]]]:
        return [
            (name, getattr(part, method))
            for name, part in self.by_name.items()
            if _overrides(part, method)
        ]

    def _overridden(self, method: str) -> list[Callable[..., Any]]:
        return [call for _, call in self._named(method)]

    def facts(self) -> dict[str, Raw]:
        """What their planners are to know of them."""
        return {name: facts() for name, facts in self._named("facts")}

    def put(self, name: str, part: StepPart) -> None:
        """Adds a part."""
        self.by_name[name] = part
        self._list()

    @contextmanager
    def with_part(self, name: str, part: StepPart) -> Iterator[None]:
        """Inside, there is one part more."""
        self.put(name, part)
        try:
            yield
        finally:
            del self.by_name[name]
            self._list()

    def close(self) -> None:
        """Releases them all."""
        parts, self.by_name = self.by_name, {}
        self._list()
        for part in parts.values():
            part.close()


def runs_here(part: type[StepPart], config: VllmConfig) -> bool:
    """Whether the worker of this config is of a pipeline stage that has the part."""
    parallel = config.parallel
    if part.ranks == "first_stage":
        return parallel.pipeline_parallel_rank == 0
    if part.ranks == "last_stage":
        return parallel.pipeline_parallel_rank == parallel.pipeline_parallel_size - 1
    return True


def _overrides(part: StepPart, method: str) -> bool:
    return getattr(getattr(part, method), "__func__", None) is not getattr(StepPart, method)
