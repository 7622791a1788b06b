"""PluginInfo: what is known of one plugin, whether it works or not."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Literal

from toolkit_lm.errors import ToolkitError
from toolkit_lm.plugin.boundary import Boundary, package_of, place_of, reason
from toolkit_lm.plugin.markers import PROJECT


class PluginWarning(UserWarning):
    """A plugin is broken and left out, or fails at what it was asked for."""


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
    packages: list[str] = field(default_factory=list)
    """Top-level packages of its entry module and of its targets."""
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
        return self._named(self.file)

    def add_package(self, module: str) -> None:
        """Its code is also in this module's top-level package. Core's is nobody's."""
        if (package := module.partition(".")[0]) not in (PROJECT, *self.packages):
            self.packages.append(package)

    def boundary(
        self, what: str, passes: type[Exception] | tuple[()] = ToolkitError, target: object = None
    ) -> Boundary:
        """For calls of the plugin's code. The error: "plugin X (..., file:line) failed in `what`:
        ...".

        `target` is what is called: its line is told where none of its own lines was run.
        """
        return Boundary(lambda error: self.failure(error, what, target), passes)

    def failure(self, error: BaseException, what: str, target: object = None) -> str:
        """One sentence that says that the plugin's code raised `error` in `what`, and at which
        line. `target` as in `boundary`."""
        frames = [
            (f.f_code.co_filename, line)
            for f, line in traceback.walk_tb(error.__traceback__)
            if package_of(f) in self.packages
        ]
        # Annotations are evaluated in the plugin's name, and in no file.
        own = [f"{name}:{line}" for name, line in frames if not name.startswith("<")]
        place = own[-1] if own else place_of(target) or self.file
        return f"{self._named(place)} failed in {what}: {reason(error)}"

    def _named(self, place: str | None) -> str:
        source = (
            " ".join(part for part in (self.distribution, self.version) if part)
            or "given from code"
        )
        return f"plugin {self.name!r} ({source}{', ' + place if place else ''})"
