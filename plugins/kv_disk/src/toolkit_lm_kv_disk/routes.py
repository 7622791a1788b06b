"""HTTP: named prefixes and the tiers' contents, for operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from toolkit_lm.errors import RequestError, nearest
from toolkit_lm_server.errors import ApiError, described
from toolkit_lm_server.route import request_context
from toolkit_lm_server.schema_texts import Described

from toolkit_lm_kv_disk.saving import Saver, checked_name
from toolkit_lm_kv_disk.share import Drop, Prefix, digest_of

if TYPE_CHECKING:
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine


class SaveBody(Described):
    """Body of POST /kv/prefixes."""

    model_config = {
        "extra": "forbid",
        "json_schema_extra": {"examples": [{"name": "manual", "prompt": "A long text ..."}]},
    }
    name: str
    """Letters, digits, '.', '_' and '-'."""
    model: str | None = None
    """A served model, or an adapter of it."""
    prompt: str | list[int] | None = None
    """The text that later prompts begin with, or its token ids. Give it or messages."""
    messages: list[dict[str, Any]] | None = None
    """The messages that later conversations begin with."""
    tools: list[dict[str, Any]] | None = None
    """The functions of these conversations."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Values that the chat template reads."""
    cache_salt: str | None = None
    """The salt of the requests that are to find the prefix."""


class DropBody(Described):
    """Body of POST /kv/prefixes/drop: one of the two."""

    model_config = {
        "extra": "forbid",
        "json_schema_extra": {"examples": [{"all": True}]},
    }
    cache_salt: str | None = None
    """Drops the prefixes that were saved with this salt: those of a tenant."""
    all: bool = False
    """Drops all named prefixes."""


class KvPrefix(Described):
    """A named prefix."""

    name: str
    created: int
    """Seconds since 1970."""
    num_tokens: int
    """Tokens at the beginning of a prompt that are found."""
    num_bytes: int
    """Bytes of its blocks, of each rank."""
    is_complete: bool
    """All of its blocks are there. Those that were damaged are written anew when a request computes
    them."""
    has_salt: bool
    """Only requests with its salt find it."""


class SavedPrefix(KvPrefix):
    """Answer of POST /kv/prefixes."""

    num_prompt_tokens: int
    """Tokens of the prompt. Those behind the last whole block are not kept."""
    num_cached_tokens: int
    """Tokens of the prompt that were not computed."""
    seconds: float
    """Time until all was on disk."""


class KvPrefixes(Described):
    """Answer of GET /kv/prefixes."""

    prefixes: list[KvPrefix]
    num_bytes: int
    """Bytes of their blocks, of each rank. What several prefixes share counts once."""
    max_bytes: int
    """Most bytes of named prefixes: a quarter of those that the folder keeps."""


class DroppedPrefixes(Described):
    """The names that are dropped."""

    dropped: list[str]


class ClearedTier(Described):
    """Answer of DELETE /kv/tiers/{tier}."""

    tier: str
    """The tier that is empty now."""


class PrefixRoutes:
    """Handlers of the routes."""

    def __init__(self, engine: ServingEngine, api: OpenAIApi) -> None:
        self._saver = Saver(engine, api)

    async def save(self, body: SaveBody, request: Request) -> SavedPrefix:
        """Computes a prompt unless it is cached, writes its prefix to disk, and keeps it there."""
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages.", "prompt")
        fields = body.model_dump(exclude_none=True, exclude={"name"})
        if body.messages is not None:
            fields["add_generation_prompt"] = False
        elif body.tools is not None or body.chat_template_kwargs is not None:
            raise RequestError("tools and chat_template_kwargs are for messages.", "tools")
        found = await self._saver.save(body.name, fields, request_context(request))
        return SavedPrefix(
            **_shown(found.prefix),
            num_prompt_tokens=found.num_prompt_tokens,
            num_cached_tokens=found.num_cached,
            seconds=round(found.seconds, 4),
        )

    async def prefixes(self) -> KvPrefixes:
        """Lists the named prefixes."""
        found = await self._saver.prefixes()
        return KvPrefixes(
            prefixes=[KvPrefix(**_shown(prefix)) for prefix in found.prefixes],
            num_bytes=found.num_bytes,
            max_bytes=found.most_bytes,
        )

    async def drop(self, name: str) -> DroppedPrefixes:
        """Drops a named prefix, with its blocks that no other one needs."""
        dropped = await self._saver.drop(Drop(checked_name(name)))
        if not dropped:
            known = [prefix.name for prefix in (await self._saver.prefixes()).prefixes]
            raise ApiError(404, f"There is no prefix {name!r}. {nearest(name, known)}")
        return DroppedPrefixes(dropped=[name])

    async def drop_several(self, body: DropBody) -> DroppedPrefixes:
        """Drops the named prefixes with a salt, or all."""
        if body.all == (body.cache_salt is not None):
            raise RequestError("give either cache_salt, or all: true.", "all")
        salt = None if body.all else digest_of(body.cache_salt)
        dropped = await self._saver.drop(Drop(salt=salt))
        return DroppedPrefixes(dropped=sorted({prefix.name for prefix in dropped}))

    async def clear(self, tier: str) -> ClearedTier:
        """Empties a KV tier, or the prefix cache of the device. Requests under way go on."""
        await self._saver.reset_tier(tier)
        return ClearedTier(tier=tier)


def _shown(prefix: Prefix) -> dict[str, Any]:
    return {
        "name": prefix.name,
        "created": int(prefix.created),
        "num_tokens": prefix.num_tokens,
        "num_bytes": prefix.num_bytes,
        "is_complete": prefix.is_complete,
        "has_salt": bool(prefix.salt),
    }


def add_routes(router: APIRouter, engine: ServingEngine, api: OpenAIApi) -> None:
    """Adds the routes."""
    routes = PrefixRoutes(engine, api)
    errors = described(404, 503)
    for method, path, handler in (
        ("POST", "/kv/prefixes", routes.save),
        ("GET", "/kv/prefixes", routes.prefixes),
        ("POST", "/kv/prefixes/drop", routes.drop_several),
        ("DELETE", "/kv/prefixes/{name}", routes.drop),
        ("DELETE", "/kv/tiers/{tier}", routes.clear),
    ):
        router.add_api_route(path, handler, methods=[method], responses=errors)
