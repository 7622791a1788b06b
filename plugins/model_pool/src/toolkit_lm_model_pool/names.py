"""The model that a request names: in its body, its form, or its query."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request
from msgspec import UNSET, Struct, UnsetType
from toolkit_lm.errors import nearest
from toolkit_lm_server.caller import CALLER
from toolkit_lm_server.errors import ApiError, printable
from toolkit_lm_server.json_body import Bodies, JsonRequest

from toolkit_lm_model_pool.durations import parse_seconds

if TYPE_CHECKING:
    from toolkit_lm_model_pool.model import PooledModel

_TAG = ":latest"
"""The tag that Ollama's clients add."""
_MOST_NAMES = 50
"""Most names that an error lists."""
_BOUNDARY = re.compile(r'boundary="?([^";\s]{1,200})"?', re.IGNORECASE)
_FIELD = rb'name="?%b"?(?:[;\r]|$)'


class _Named(Struct):
    """The fields of a body that say something to a pool."""

    model: Any = UNSET
    name: Any = UNSET
    keep_alive: Any = UNSET
    prompt: Any = UNSET
    messages: Any = UNSET
    stream: Any = UNSET
    lora_name: Any = UNSET


class Asked(Struct, frozen=True):
    """Model and keep_alive that a request names."""

    model: str | None
    """The model's name. None: it names none."""
    keep_alive: object = None
    """Ollama's field. None: the body has none."""
    is_empty: bool = False
    """The body has neither a prompt nor messages."""
    streams: bool = False
    """The body asks for a stream."""
    lora_name: str | None = None
    """The adapter that the body would load. None: it names none."""

    @property
    def unloads(self) -> bool:
        """Whether Ollama would only unload the model: nothing is asked, and nothing kept."""
        with suppress(ValueError):
            return self.is_empty and parse_seconds(self.keep_alive) == 0
        return False


async def asked(request: Request, body: bytes, bodies: Bodies) -> Asked:
    """The model and keep_alive of a request with this body. Raises ApiError (400)."""
    query = request.query_params.get("model")
    kind = request.headers.get("content-type", "")
    if not body:
        return Asked(query)
    if kind.lower().startswith("multipart/form-data"):
        streams = _of_form(body, kind, b"stream") in ("true", "True", "1")
        return Asked(_of_form(body, kind, b"model") or query, streams=streams)
    try:
        named = msgspec.json.decode(body, type=_Named)
        found: Mapping[str, Any] = msgspec.structs.asdict(named)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = await _parsed(request, body, bodies)
    name = found.get("model", UNSET)
    if name in (UNSET, None) and request.url.path.startswith("/api/"):
        name = found.get("name", UNSET)
    if not isinstance(name, str | UnsetType | None):
        raise ApiError(400, "Invalid value for 'model': it must be a text.", param="model")
    keep_alive = found.get("keep_alive", UNSET)
    asks = (found.get(field, UNSET) for field in ("prompt", "messages"))
    return Asked(
        name if isinstance(name, str) else query,
        None if keep_alive is UNSET else keep_alive,
        not any(value is not UNSET and value for value in asks),
        found.get("stream", UNSET) is True,
        loaded if isinstance(loaded := found.get("lora_name"), str) else None,
    )


async def _parsed(request: Request, body: bytes, bodies: Bodies) -> Mapping[str, Any]:
    """The body's JSON, by the server's own reading of it. Empty for other values than objects."""
    try:
        read = await JsonRequest(request, body, bodies).json()
    except json.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error.msg}.") from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "The body is not valid JSON: it cannot be parsed.") from error
    return read if isinstance(read, dict) else {}


def _of_form(body: bytes, kind: str, field: bytes) -> str | None:
    """A field of a form with several parts."""
    match = _BOUNDARY.search(kind)
    if match is None:
        return None
    wanted = re.compile(_FIELD % field, re.IGNORECASE)
    for part in body.split(b"--" + match[1].encode(errors="surrogateescape")):
        head, _, value = part.partition(b"\r\n\r\n")
        if len(head) < 1024 and len(value) < 1024 and wanted.search(head):
            return value.removesuffix(b"\r\n").decode(errors="replace")
    return None


def may_use(model: PooledModel) -> bool:
    """Whether the caller's key may see and use a model."""
    return CALLER.get().may_use_model((model.name, *model.entry.aliases))


def names_of(model: PooledModel) -> Iterator[str]:
    """The names of a model that the caller's key may see and use: its own, and its adapters'. A key
    that is limited to the name of an adapter has that adapter alone."""
    caller = CALLER.get()
    is_whole = may_use(model)
    if is_whole:
        yield model.name
        yield from model.entry.aliases
    for name in model.adapters:
        if caller.may_use(name) and (is_whole or caller.may_use_model([name])):
            yield name


def adapter_of(model: PooledModel, name: str | None) -> str | None:
    """The adapter of a model that a name means. None: it means the model."""
    own = (model.name, *model.entry.aliases)
    for spelled in (name, name and name.removesuffix(_TAG)):
        if spelled in own:
            return None
        if spelled in model.adapters:
            return spelled
    return None


def check_new_adapter(models: Mapping[str, PooledModel], model: PooledModel, name: str) -> None:
    """Raises ApiError (400) where an adapter that a model is to have would have a name of
    another."""
    for other in models.values():
        own = (other.name, *other.entry.aliases)
        if name in own or (other is not model and name in other.adapters):
            raise ApiError(
                400,
                f"The adapter {printable(name)!r} cannot be loaded: the model {other.name!r} has "
                "this name, or an adapter of this name. Give it another.",
                param="lora_name",
            )


def _known(models: Mapping[str, PooledModel]) -> dict[str, PooledModel]:
    """Models by the names that the caller's key may use. An entry's names come before those of
    adapters that were loaded since."""
    known = {name: model for model in models.values() for name in names_of(model)}
    for model in filter(may_use, models.values()):
        known |= dict.fromkeys((model.name, *model.entry.aliases), model)
    return known


def find(models: Mapping[str, PooledModel], name: str | None) -> PooledModel:
    """The model of a name. A request that names none gets the only one. Raises ApiError (404) with
    the nearest names, and (400)."""
    known = _known(models)
    if name is None:
        if len(models) == 1 and (only := next(iter(models.values()))) and may_use(only):
            return only
        shown = ", ".join(map(repr, list(known)[:_MOST_NAMES]))
        raise ApiError(
            400,
            "You must provide the parameter 'model', in the body or as ?model=NAME. This server "
            f"has {shown}.",
            param="model",
            code="missing_required_parameter",
        )
    found = known.get(name) or known.get(name.removesuffix(_TAG))
    if found is None:
        shown = printable(name)
        raise ApiError(
            404,
            f"The model {shown!r} does not exist. {nearest(shown, list(known)[:1000])}",
            param="model",
            code="model_not_found",
        )
    return found
