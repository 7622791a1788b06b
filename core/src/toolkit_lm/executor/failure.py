"""What a worker in another process has raised, as the engine's process raises it."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from msgspec import Struct

from toolkit_lm import errors
from toolkit_lm.errors import ToolkitError


class Failure(Struct, frozen=True):
    """An error on its way between processes."""

    kind: str
    """The nearest class of errors.py, by name."""
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, worded: Callable[[BaseException], str]) -> Failure:
        """`worded` says what is no ToolkitError, such as `Plugins.failure`, which names the plugin
        that raised it."""
        kind = next(
            (one.__name__ for one in type(error).__mro__ if one.__module__ == errors.__name__),
            ToolkitError.__name__,
        )
        message = str(error) if isinstance(error, ToolkitError) else worded(error)
        return cls(kind, message, "".join(traceback.format_exception(error)))

    def error(self, where: str) -> ToolkitError:
        """`where`: such as "on rank 1". Its frames are core's, so that no executor is blamed for
        what its workers run."""
        try:
            raise getattr(errors, self.kind)(f"{self.message.rstrip('.')} ({where}).")
        except ToolkitError as error:
            error.add_note(f"{where}, in the worker's process:\n{self.traceback}")
            return error
