"""The registry of parts of a step. A part has up to three halves, one for each process that a
request passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import PluginError
from toolkit_lm.plugin.registry import Entry, Registry

Half = Literal["request", "planner", "worker"]
"""Place where a half runs: the front, the scheduler, or each worker."""

_BASES: dict[Half, str] = {
    "request": "toolkit_lm.processing:RequestHalf",
    "planner": "toolkit_lm.scheduler:Planner",
    "worker": "toolkit_lm.step:StepPart",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEntry(Entry):
    """A part. Its `target` is that of its first half."""

    halves: dict[Half, str]
    """"module:Class" of each half that the part has."""
    for_model: str | None = None
    """"module:function", a predicate of the resolved config; None: the part is for every model."""

    @property
    def shown(self) -> str:
        return ", ".join(f"{half} {target}" for half, target in self.halves.items())


class PartRegistry(Registry[PartEntry]):
    """Parts, by name. They come into steps in the order of registration."""

    noun = "part"
    base = None

    def add(
        self,
        name: str,
        *,
        request: str | None = None,
        planner: str | None = None,
        worker: str | None = None,
        for_model: str | None = None,
        override: bool = False,
    ) -> None:
        """Registers a part by its halves, each "module:Class"; at least one is required.

        `request`: a subclass of toolkit_lm.processing.RequestHalf, for the front. `planner`: a
        subclass of toolkit_lm.scheduler.Planner. `worker`: a subclass of toolkit_lm.step.StepPart.
        The modules of the first two import no torch.

        `for_model`: "module:function", called with the resolved VllmConfig in each process, returns
        whether the part is used. Its module imports no torch. None: with every model. Raises
        PluginError for a malformed target or a name that another plugin has.
        """
        halves = dict(zip(get_args(Half), (request, planner, worker), strict=True))
        stated = {half: target for half, target in halves.items() if target is not None}
        if not stated:
            raise PluginError(
                f"{self.owner}: part {name!r} has no half: give request, planner or worker."
            )
        for target in (*stated.values(), for_model or "module:function"):
            self.check_target(name, target, "module:Class")
        self.add_entry(
            PartEntry,
            name,
            next(iter(stated.values())),
            "module:Class",
            halves=stated,
            for_model=for_model,
            override=override,
        )
        for target in (*stated.values(), *filter(None, [for_model])):
            cast(Any, self.owner).add_package(target)

    def used(self, half: Half, config: VllmConfig) -> list[PartEntry]:
        """The parts that have this half and are for this model, in their order. Raises PluginError
        if a predicate fails."""
        return [
            entry
            for entry in self.entries()
            if half in entry.halves and self._is_for(entry, config)
        ]

    def load_half(self, name: str, half: Half) -> Any:
        """Imports a half's class. Raises PluginError if that fails, or if it is not a subclass of
        its contract."""
        entry = self.get(name)
        return self.load_target(entry, entry.halves[half], _BASES[half])

    def make_half(self, name: str, half: Half, *arguments: Any, **named: Any) -> Any:
        """Makes an instance of a half. Raises PluginError, which names the plugin, if that fails; a
        ToolkitError passes."""
        target = self.load_half(name, half)
        with self.get(name).owner.boundary(f"{half} half of part {name!r}", target=target):
            return target(*arguments, **named)

    def load(self, key: str) -> Any:
        """Imports all halves; returns the class of the last."""
        return [self.load_half(key, half) for half in self.get(key).halves][-1]

    def _is_for(self, entry: PartEntry, config: VllmConfig) -> bool:
        if entry.for_model is None:
            return True
        predicate = self.load_target(entry, entry.for_model, "")
        with entry.owner.boundary(f"for_model of part {entry.key!r}", passes=(), target=predicate):
            return bool(predicate(config))
