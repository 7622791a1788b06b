"""The registry of KV tiers: places for KV blocks off the device, each in up to two halves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit_lm.errors import PluginError
from toolkit_lm.plugin.registry import Entry, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTierEntry(Entry):
    """A KV tier. Its `target` is the worker half."""

    scheduler: str | None = None
    """"module:Class" of the scheduler half, which knows the tier's contents. None: the tier only
    holds blocks of preempted requests."""


class KVTierRegistry(Registry[KVTierEntry]):
    """KV tiers, by name. They are asked in the order of registration."""

    noun = "KV tier"
    base = "toolkit_lm.kv:KVTierStore"

    def add(
        self, name: str, worker: str, *, scheduler: str | None = None, override: bool = False
    ) -> None:
        """Registers a tier by its halves, each "module:Class".

        `worker`: a subclass of toolkit_lm.kv.KVTierStore, which stores the bytes. `scheduler`: a
        subclass of toolkit_lm.kv.KVTier, which knows the contents; its module imports no torch.
        Raises PluginError for a malformed target or a name that another plugin has.
        """
        if scheduler is not None:
            self.check_target(name, scheduler, "module:Class")
        self.add_entry(
            KVTierEntry, name, worker, "module:Class", scheduler=scheduler, override=override
        )
        if scheduler is not None and self.owner is not None:
            self.owner.add_package(scheduler.partition(":")[0])

    def load_tier(self, name: str) -> Any:
        """Imports the class of a scheduler half. Raises PluginError if that fails, or if it is not
        a KVTier."""
        entry = self.get(name)
        if entry.scheduler is None:
            raise PluginError(f"KV tier {name!r} has no half in the scheduler.")
        return self.load_target(entry, entry.scheduler, "toolkit_lm.kv:KVTier")

    def make_tier(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Makes a scheduler half. Raises PluginError, which names the plugin, if that fails; a
        ToolkitError passes."""
        target = self.load_tier(name)
        with self.get(name).owner.boundary(f"KV tier {name!r}", target=target):
            return target(*arguments, **named)
