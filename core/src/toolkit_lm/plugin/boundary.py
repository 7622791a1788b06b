"""The error boundary: what a plugin's code raises is said in the plugin's name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from toolkit_lm.errors import PluginError, ToolkitError


class Boundary:
    """Stands around calls of a plugin's code, `with boundary:`, any number of times. An error
    becomes a PluginError."""

    def __init__(
        self,
        failure: Callable[[BaseException], str | None],
        passes: type[Exception] | tuple[()] = ToolkitError,
    ) -> None:
        """`failure` words an error; None: it is no plugin's, and passes. `passes`: so do these,
        which are meant for users."""
        self._failure = failure
        self._passes = passes

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.check(error)

    def check(self, error: BaseException | None) -> None:
        """Raises PluginError where a plugin is to blame for an error."""
        if (
            isinstance(error, (Exception, SystemExit))
            and not isinstance(error, self._passes)
            and (message := self._failure(error))
        ):
            raise PluginError(message) from error


def package_of(frame: FrameType) -> str:
    """The top-level package of the code that a frame runs."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def place_of(target: object) -> str | None:
    """Where a class or function stands, as "file:line"; None where that cannot be known."""
    code: Any = target
    try:
        return f"{inspect.getsourcefile(code)}:{inspect.getsourcelines(code)[1]}"
    except (OSError, TypeError):
        return None


def reason(error: BaseException) -> str:
    """What an error says; of one that is not meant for users, its type too, and its notes."""
    if isinstance(error, ToolkitError):
        return str(error)
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{notes}"
