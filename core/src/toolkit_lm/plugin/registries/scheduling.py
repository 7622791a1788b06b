"""What the scheduler works by: policies, and the kinds of KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit_lm.plugin.registry import Entry, PlainRegistry, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicyEntry(Entry):
    """A scheduling policy: a function, or a class."""

    reads_priority: bool = False
    """True: it looks at the priority that a request gives."""


class SchedulingPolicyRegistry(Registry[SchedulingPolicyEntry]):
    """Scheduling policies, by the name that the option scheduling_policy gives."""

    noun = "scheduling policy"

    def add(
        self, name: str, target: str, *, reads_priority: bool = False, override: bool = False
    ) -> None:
        """Registers a subclass of toolkit_lm.scheduler.SchedulingPolicy, or a function that is its
        `key`.

        `reads_priority`: it looks at the priority of requests.
        """
        self.add_entry(
            SchedulingPolicyEntry,
            name,
            target,
            "module:function",
            reads_priority=reads_priority,
            override=override,
        )


class KVKindRegistry(PlainRegistry):
    """Subclasses of toolkit_lm.attention.KVCacheSpec, by their tags. Their modules import no
    torch."""

    noun = "KV kind"
    base = "toolkit_lm.attention:KVCacheSpec"
