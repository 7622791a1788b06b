"""PluginInfo: what is known of one plugin, whether it works or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


class PluginWarning(UserWarning):
    """A plugin is broken and left out, or costs more than it should."""


@dataclass(slots=True)
class PluginInfo:
    """One plugin: where it comes from, and what became of it."""

    name: str
    """Name of its entry point, or of the object given from code."""
    distribution: str | None = None
    """None for an object given from code."""
    version: str | None = None
    file: str | None = None
    """Its entry module; None before it is found."""
    status: Literal["ok", "broken", "disabled"] = "ok"
    error: str | None = None
    """Why it is broken."""
    traceback: str | None = None
    import_seconds: float = 0.0
    """CPU time that importing the entry module took."""
    hooks: list[str] = field(default_factory=list)
    """Hooks that it implements."""
    notes: list[str] = field(default_factory=list)
    """Remarks that stop nothing."""

    def __str__(self) -> str:
        source = " ".join(part for part in (self.distribution, self.version) if part) or "given from code"
        return f"plugin {self.name!r} ({source}{', ' + self.file if self.file else ''})"
