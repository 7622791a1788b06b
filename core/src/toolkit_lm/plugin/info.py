"""PluginInfo: the state of one plugin, working or not."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Literal

from toolkit_lm.errors import ToolkitError
from toolkit_lm.plugin.boundary import Boundary, package_of, place_of, reason
from toolkit_lm.plugin.markers import PROJECT


class PluginWarning(UserWarning):
    """A plugin is broken and left out, or fails at a call."""


@dataclass(slots=True)
class PluginInfo:
    """One plugin: its origin, and the result of loading it."""

    name: str
    """Name of the plugin's entry point, or of the object given from code."""
    distribution: str | None = None
    """Name of the distribution. None for an object given from code."""
    version: str | None = None
    file: str | None = None
    """File of the entry module; None before it is found."""
    packages: list[str] = field(default_factory=list)
    """Top-level packages of the plugin's entry module and targets."""
    status: Literal["ok", "broken", "disabled"] = "ok"
    error: str | None = None
    """Reason for which the plugin is broken."""
    traceback: str | None = None
    import_seconds: float = 0.0
    """CPU time of importing the entry module, in seconds."""
    hooks: list[str] = field(default_factory=list)
    """Hooks that the plugin implements."""
    notes: list[str] = field(default_factory=list)
    """Remarks that stop nothing."""

    def __str__(self) -> str:
        return self._named(self.file)

    def add_package(self, module: str) -> None:
        """Records that the plugin's code is also in this module's top-level package. Core's package
        belongs to no plugin."""
        if (package := module.partition(".")[0]) not in (PROJECT, *self.packages):
            self.packages.append(package)

    def boundary(
        self, action: str, passes: type[Exception] | tuple[()] = ToolkitError, target: object = None
    ) -> Boundary:
        """Error boundary for calls of the plugin's code. The error reads "plugin X (..., file:line)
        failed in `action`: ...".

        `target` is the called object: its line is named if none of the plugin's own lines was run.
        """
        return Boundary(lambda error: self.failure(error, action, target), passes)

    def failure(self, error: BaseException, action: str, target: object = None) -> str:
        """Sentence that the plugin's code raised `error` in `action`, with the line. `target` as in
        `boundary`."""
        frames = [
            (f.f_code.co_filename, line)
            for f, line in traceback.walk_tb(error.__traceback__)
            if package_of(f) in self.packages
        ]
        # Annotations are evaluated in the plugin's name, and in no file.
        own = [f"{name}:{line}" for name, line in frames if not name.startswith("<")]
        place = own[-1] if own else place_of(target) or self.file
        return f"{self._named(place)} failed in {action}: {reason(error)}"

    def _named(self, place: str | None) -> str:
        source = (
            " ".join(part for part in (self.distribution, self.version) if part)
            or "given from code"
        )
        return f"plugin {self.name!r} ({source}{', ' + place if place else ''})"
