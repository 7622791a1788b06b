"""KV tiers: places for KV blocks beside the device, each in up to two halves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit_lm.errors import PluginError
from toolkit_lm.plugin.registry import Entry, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTierEntry(Entry):
    """A KV tier. Its `target` is that of its worker's half."""

    scheduler: str | None = None
    """"module:Class" of the half that says which contents the tier has; None: it has blocks of
    preempted requests only."""


class KVTierRegistry(Registry[KVTierEntry]):
    """KV tiers, by name. Those that are registered first are asked first."""

    noun = "KV tier"
    base = "toolkit_lm.kv:KVTierStore"

    def add(
        self, name: str, worker: str, *, scheduler: str | None = None, override: bool = False
    ) -> None:
        """Registers a tier by its halves, each "module:Class".

        `worker`: a subclass of toolkit_lm.kv.KVTierStore, which keeps the bytes. `scheduler`: one
        of toolkit_lm.kv.KVTier, which knows what is there; its module imports no torch. Raises
        PluginError for a malformed target or a name that another plugin has.
        """
        if scheduler is not None:
            self.check_target(name, scheduler, "module:Class")
        self.add_entry(
            KVTierEntry, name, worker, "module:Class", scheduler=scheduler, override=override
        )
        if scheduler is not None and self.owner is not None:
            self.owner.add_package(scheduler.partition(":")[0])

    def load_tier(self, name: str) -> Any:
        """Imports the class of a scheduler's half. Raises PluginError where that fails, or it is no
        KVTier."""
        entry = self.get(name)
        if entry.scheduler is None:
            raise PluginError(f"KV tier {name!r} has no half in the scheduler.")
        return self.load_target(entry, entry.scheduler, "toolkit_lm.kv:KVTier")

    def make_tier(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Makes the scheduler's half. Raises PluginError, naming the plugin, where that fails; a
        ToolkitError passes."""
        target = self.load_tier(name)
        with self.get(name).owner.boundary(f"KV tier {name!r}", target=target):
            return target(*arguments, **named)
