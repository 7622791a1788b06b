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
import re
from collections.abc import Iterable, Mapping


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
    """One request cannot be served. `param` names the parameter at fault, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """A request's prompt does not fit in max_model_len."""


class QueueFullError(RequestError):
    """Too many requests, or too many tokens, are queued. `retry_after` is an estimate in
    seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDeadError(ToolkitError):
    """The engine has stopped and serves no more requests; `__cause__` is the root cause."""


_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a mapping",
    "null": "none",
}
"""msgspec's names of types, in plain words."""


def in_plain_words(error: Exception, name: str, value: object = None) -> str:
    """Sentence for msgspec's error about a wrong value: "port must be a whole number, not 'abc'."

    `name`: the value's name as the user wrote it, or a prefix that ends with a space. The position
    inside the value is appended. `value`: shown if the error concerns all of it, or one of its
    keys. Messages of other errors are unchanged.
    """

    def words(types: re.Match[str]) -> str:
        return " or ".join(_TYPES.get(kind, kind) for kind in types[1].split(" | "))

    reason, _, place = str(error).partition(" - at `$")
    place = place.rstrip("`")
    key = place.lstrip(".")
    name += key if name.endswith(" ") else place
    if isinstance(value, Mapping) and key in value:
        value = value[key]
        place = ""
    if (wanted := reason.removeprefix("Expected ")) != reason:
        wanted, _, got = re.sub("`(.*?)`", words, wanted).partition(", got ")
        return f"{name} must be {wanted}, not {got if place and got else repr(value)}."
    reason = re.sub("^Object (?:contains )?(.*) field `(.*)`", r"\1 field '\2'", reason)
    return f"{name.rstrip()}: {reason.rstrip('.')}."


DOCUMENTATION = "https://github.com/toolkit-lm/toolkit-lm/tree/main/docs"
"""Address of the documentation, as in the distributions' metadata."""


def page(name: str) -> str:
    """Address of a page of the documentation, such as "hooks/toolkit_watch.md", for an error's
    hint."""
    return f"{DOCUMENTATION}/{name}"


def nearest(
    name: str, known: Iterable[str], count: int = 3, *, otherwise: str | None = None
) -> str:
    """End of an error sentence: the names closest to `name`. If none is close: `otherwise`, by
    default all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=count, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(repr(c) for c in close)}?"
    return f"Known: {', '.join(known) or 'none'}." if otherwise is None else otherwise
