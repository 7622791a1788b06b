"""The part in a server that publishes KV events: it tells the engine of the chunks of each prompt,
by which routers know prompts."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from fastapi import APIRouter
from toolkit_lm_server.route import ServerRoute

from toolkit_lm_router.asking import chunks
from toolkit_lm_router.prefixes import Hasher, num_bytes

KEY = b"toolkit-lm-router"
"""Key of the digests that routers and servers share. It is public."""
PROMPT = "kv_events.prompt"
"""Key of a request's context, which the plugin kv_events reads."""

_hasher = Hasher(KEY)


def describe(path: str, body: bytes) -> Mapping[str, str]:
    """The chunks of a request's prompt, as a router has them."""
    digests, length = chunks(path, body, _hasher)
    if not digests:
        return {}
    ends = [(digest, num_bytes(i)) for i, digest in enumerate(digests, 1)]
    return {PROMPT: msgspec.json.encode({"num_bytes": length, "chunks": ends}).decode()}


def describe_in(router: APIRouter) -> None:
    """Has a server describe the bodies of its requests."""
    assert issubclass(router.route_class, ServerRoute), "the server makes the routers of plugins"
    router.route_class.describers.append(describe)
