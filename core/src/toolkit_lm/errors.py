"""Every error that toolkit-lm raises on purpose. Each message names the culprit and the
alternatives.

ToolkitError
├── ConfigError (ValueError)        an option: unknown, of a wrong type, out of range, in conflict
├── PluginError                     a plugin that cannot be found, imported or registered
├── CheckpointError (ValueError)    a checkpoint: missing or broken files, names, shapes that misfit
├── UnsupportedError                a combination that no registered component can run
├── CapacityError                   not enough memory for what was asked
├── RequestError (ValueError)       one request; the others go on
│   ├── ContextLengthError          its prompt does not fit in max_model_len
│   └── QueueFullError              too many requests wait; `retry_after` says when to come again
└── EngineDeadError                 the engine has stopped; `__cause__` says why
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ToolkitError(Exception):
    """Base of all errors meant for users: shown as one message, without a traceback unless asked
    for."""


class ConfigError(ToolkitError, ValueError):
    """An option is unknown, of a wrong type, out of range, or in conflict with another."""


class PluginError(ToolkitError):
    """A plugin cannot be found, imported or registered."""


class CheckpointError(ToolkitError, ValueError):
    """A checkpoint has missing or broken files, or weights that do not fit the model."""


class UnsupportedError(ToolkitError):
    """No registered component can run what was asked; the message gives each candidate's reason."""


class CapacityError(ToolkitError):
    """There is not enough memory for what was asked."""


class RequestError(ToolkitError, ValueError):
    """One request cannot be served. `param` names the offending parameter, where there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """A request's prompt does not fit in max_model_len."""


class QueueFullError(RequestError):
    """Too many requests, or too many tokens, wait for a place in the batch. `retry_after` is in
    seconds, a guess."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDeadError(ToolkitError):
    """The engine has stopped and serves no more requests; `__cause__` is the root cause."""


DOCUMENTATION = "https://github.com/toolkit-lm/toolkit-lm/tree/main/docs"
"""As the distributions' metadata have it."""


def page(name: str) -> str:
    """The address of a page of the documentation, such as "hooks/toolkit_watch.md", for an error's
    hint."""
    return f"{DOCUMENTATION}/{name}"


def nearest(
    name: str, known: Iterable[str], count: int = 3, *, otherwise: str | None = None
) -> str:
    """The end of an error sentence: the names closest to `name`; when none is close, `otherwise`,
    by default all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=count, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(repr(c) for c in close)}?"
    return f"Known: {', '.join(known) or 'none'}." if otherwise is None else otherwise
