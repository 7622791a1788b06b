"""The error boundary: turns exceptions of a plugin's code into errors that name the plugin."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from toolkit_lm.errors import PluginError, ToolkitError


class Boundary:
    """Context for calls of a plugin's code, `with boundary:`, any number of times. An exception
    becomes a PluginError."""

    def __init__(
        self,
        failure: Callable[[BaseException], str | None],
        passes: type[Exception] | tuple[()] = ToolkitError,
    ) -> None:
        """`failure` words an exception; None: it comes from no plugin, and passes. `passes`:
        exceptions meant for users, which pass too."""
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
        """Raises PluginError if a plugin caused the error."""
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
    """Position of a class or function in the source, as "file:line"; None if unknown."""
    code: Any = target
    try:
        return f"{inspect.getsourcefile(code)}:{inspect.getsourcelines(code)[1]}"
    except (OSError, TypeError):
        return None


def reason(error: BaseException) -> str:
    """Text of an exception with its notes. The type precedes it unless the exception is meant for
    users."""
    if isinstance(error, ToolkitError):
        return str(error)
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{notes}"
