"""The caller of an HTTP request, known wherever the request is worked on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import Any

from msgspec import Struct

KEY = "toolkit_lm.caller"
"""Key of the Caller in a request's scope, for layers around the app."""


class Caller(Struct):
    """The client of a request, and how the request is to be read and answered."""

    request_id: str = ""
    """The client's x-request-id where it is a plain word, else one that the server makes."""
    client: str = ""
    """The client that takes turns with others: the name of its key, else its address."""
    key: str | None = None
    """The name of the client's API key; None where no client needs one."""
    on_behalf: bool = False
    """The server itself asks for the client, which it let in before. `key` stands for the key."""
    adapters: tuple[str, ...] | None = None
    """Patterns of the names of adapters that the key may see and use. None: all."""
    models: tuple[str, ...] | None = None
    """Patterns of the names of models that the key may see and use. None: all."""
    adapter: str | None = None
    """The adapter that requests have as their model which name none. Set where the name of an
    adapter has led to this server's engine."""
    unknown: Any = None
    """The body's unknown fields, as UnknownFields. None outside of a request, where a body must
    have none."""
    keep_alive: float | None = None
    """Seconds after which an idle stream sends a comment."""
    is_large: bool = False
    """The body is so large that work on all of it would hold up the event loop."""
    takes_templates: bool = False
    """The body may bring a chat template."""
    refuses_hosted_tools: bool = False
    """Tools that a vendor's server runs are an error. False: they are left out, with a warning."""
    context: Mapping[str, str] = {}
    """Facts of the request's body, by plugins that describe it."""
    held: frozenset[str] = frozenset()
    """Identifiers of media items that the engine holds which asks a render server."""

    def may_use(self, adapter: str) -> bool:
        """Whether the client's key may see and use an adapter of that name."""
        return _matches([adapter], self.adapters)

    def may_use_model(self, names: Iterable[str]) -> bool:
        """Whether the client's key may see and use a model with these names."""
        return _matches(names, self.models)


def _matches(names: Iterable[str], patterns: tuple[str, ...] | None) -> bool:
    return patterns is None or any(
        fnmatchcase(name, pattern) for name in names for pattern in patterns
    )


NOBODY = Caller()
"""The caller outside of a request. It is never changed."""
CALLER: ContextVar[Caller] = ContextVar("CALLER", default=NOBODY)
"""The caller of the request that is worked on. Its threads see it, too."""
