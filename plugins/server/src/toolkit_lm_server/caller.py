"""Who asks: what is known of an HTTP request wherever it is worked on."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from toolkit_lm_server.keys import Account

KEY = "toolkit_lm.caller"
"""The key of a request's scope with its Caller, for what is around the app."""


class Caller(Struct):
    """Who asks, and how the request is to be read and answered."""

    request_id: str = ""
    """The client's x-request-id where it is a plain word, else one of our own."""
    client: str = ""
    """Whose turn it is: the name of the client's key, else its address."""
    account: Account | None = None
    """Of the client's key."""
    unknown: Any = None
    """Fields of the body that nobody knows, as UnknownFields, which finds them here. None:
    outside of a request, which has to have none."""
    keep_alive: float | None = None
    """Seconds after which a stream that has nothing to send sends a comment."""
    takes_templates: bool = False
    """The body may have a chat template."""
    held: frozenset[str] = frozenset()
    """Items of media that the engine which asks a render server holds."""


NOBODY = Caller()
"""Outside of a request. It is never changed."""
CALLER: ContextVar[Caller] = ContextVar("CALLER", default=NOBODY)
"""Of the request that is worked on, in its threads too."""
