"""Failure: carries a worker's exception to the engine's process."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from msgspec import Struct

from toolkit_lm import errors
from toolkit_lm.errors import ToolkitError


class Failure(Struct, frozen=True):
    """An exception, in a form that can be sent between processes."""

    kind: str
    """Name of the nearest class of errors.py."""
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, worded: Callable[[BaseException], str]) -> Failure:
        """Makes a Failure. `worded` gives the text of an exception that is not a ToolkitError. An
        example is `Plugins.failure`, which names the plugin that raised it."""
        kind = next(
            (base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__),
            ToolkitError.__name__,
        )
        message = str(error) if isinstance(error, ToolkitError) else worded(error)
        return cls(kind, message, "".join(traceback.format_exception(error)))

    def error(self, where: str) -> ToolkitError:
        """Makes the exception to raise. `where`: for instance "on rank 1". Its frames are core's,
        so that no executor is blamed for its workers' code."""
        try:
            raise getattr(errors, self.kind)(f"{self.message.rstrip('.')} ({where}).")
        except ToolkitError as error:
            error.add_note(f"{where}, in the worker's process:\n{self.traceback}")
            return error
