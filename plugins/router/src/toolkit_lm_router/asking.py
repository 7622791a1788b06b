"""What the router reads of a request: the prompt, the model, the session, and what may be done
again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, field

from toolkit_lm_router.policy import Wanted
from toolkit_lm_router.prefixes import Hasher

_MOST_NAME = 256
"""Most characters of a model's name or a session's that count."""
_RESUMABLE = ("/v1/chat/completions", "/v1/completions")
"""Paths whose streams can go on on another backend."""
_TRUE = b"true"


class _Fields(Struct):
    """Fields of any API's body, as they came. The backend checks them."""

    model: Raw | UnsetType = UNSET
    stream: Raw | UnsetType = UNSET
    seed: Raw | UnsetType = UNSET
    store: Raw | UnsetType = UNSET
    background: Raw | UnsetType = UNSET
    previous_response_id: Raw | UnsetType = UNSET
    conversation: Raw | UnsetType = UNSET
    user: Raw | UnsetType = UNSET
    prompt_cache_key: Raw | UnsetType = UNSET
    cache_salt: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    system: Raw | UnsetType = UNSET
    instructions: Raw | UnsetType = UNSET
    messages: list[Raw] | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    text: Raw | UnsetType = UNSET
    token_ids: Raw | UnsetType = UNSET
    inputs: Raw | UnsetType = UNSET
    n: Raw | UnsetType = UNSET
    adapter: Raw | UnsetType = UNSET
    lora_path: Raw | UnsetType = UNSET
    lora: Raw | UnsetType = UNSET
    return_token_ids: Raw | UnsetType = UNSET
    begun_token_ids: Raw | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET


class _Loose(_Fields):
    messages: Raw | UnsetType = UNSET  # type: ignore[assignment]


_strict = msgspec.json.Decoder(_Fields)
_loose = msgspec.json.Decoder(_Loose)


class Asked(Struct):
    """A request, as the router sees it."""

    path: str
    body: bytes
    model: str | None = None
    """The model's name; None: the backend's own."""
    wanted: Wanted = field(default_factory=Wanted)
    is_stream: bool = False
    is_stored: bool = False
    """The answer is kept by the backend: sent twice, the request would leave two."""
    needs_state: str = ""
    """The field that names what one backend has kept; empty: none."""
    has_seed: bool = False
    has_ids: bool = False
    """The client wants token ids."""
    adapters: dict[str, str | None] = field(default_factory=dict)
    """Fields that ask for an adapter beside the model, and its name. None: they tell no name."""
    is_single: bool = False
    """The answer is one sequence that nobody has begun."""
    is_object: bool = False
    """The body is a JSON object with fields."""
    has_transfer: bool = False
    """The client moves KV blocks itself."""

    @property
    def is_completion(self) -> bool:
        """Whether its prompt can be computed on another backend than its answer."""
        return self.path in _RESUMABLE and not self.has_transfer

    @property
    def is_resumable(self) -> bool:
        """Whether its stream can go on on another backend."""
        return self.is_stream and not self.is_stored and self.path in _RESUMABLE

    def with_fields(self, **fields: object) -> bytes:
        """The body with more fields, which count in place of its own. It must have some."""
        return with_fields(self.body, fields)


def with_fields(body: bytes, fields: Mapping[str, object]) -> bytes:
    """A JSON object, which has fields, with more of them."""
    if not fields:
        return body
    end = body.rindex(b"}")
    return b"%b,%b" % (body[:end], msgspec.json.encode(fields)[1:])


def read(path: str, body: bytes, headers: Mapping[str, str], hasher: Hasher) -> Asked:
    """Reads a request. Other bodies than JSON objects are left to the backend to refuse."""
    session = headers.get("x-session-id", "")
    if "json" not in headers.get("content-type", "json"):
        return Asked(path, body, wanted=Wanted(session=session[:_MOST_NAME]))
    fields = _fields(body)
    if fields is None:
        return Asked(path, body, wanted=Wanted(session=session[:_MOST_NAME]))
    session = session or _text(fields.prompt_cache_key) or _text(fields.user) or ""
    state = next(
        (
            name
            for name in ("previous_response_id", "conversation")
            if _is_set(getattr(fields, name))
        ),
        "",
    )
    return Asked(
        path,
        body,
        model=_text(fields.model),
        wanted=Wanted(hasher.digests(_parts(fields), _head(path, fields)), session[:_MOST_NAME]),
        is_stream=_bytes(fields.stream) == _TRUE,
        is_stored=_TRUE in (_bytes(fields.store), _bytes(fields.background)),
        needs_state=state,
        has_seed=_is_set(fields.seed),
        has_ids=_bytes(fields.return_token_ids) == _TRUE,
        adapters={
            name: _text(value)
            for name in ("adapter", "lora_path", "lora")
            if _is_set(value := getattr(fields, name))
        },
        is_object=len(body) > 2,
        has_transfer=_is_set(fields.kv_transfer_params),
        is_single=_bytes(fields.n) in (b"", b"null", b"1") and not _is_set(fields.begun_token_ids),
    )


def _fields(body: bytes) -> _Fields | None:
    for decoder in (_strict, _loose):
        try:
            return decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return None


def chunks(path: str, body: bytes, hasher: Hasher) -> tuple[list[int], int]:
    """The digests of a request's prompt, as `read` has them, and the prompt's number of bytes."""
    if (fields := _fields(body)) is None:
        return [], 0
    parts = [*_parts(fields)]
    return hasher.digests(parts, _head(path, fields)), sum(map(len, parts))


def _head(path: str, fields: _Fields) -> bytes:
    """The facts, beside its text, on which a prompt's cache depends."""
    kind = b"text" if "completions" in path and "chat" not in path else b"chat"
    return b"\0".join((kind, _bytes(fields.model), _bytes(fields.cache_salt)))


def _parts(fields: _Fields) -> Iterator[bytes]:
    """The prompt, piece by piece, in the order in which a model reads it."""
    for name in ("tools", "system", "instructions"):
        yield _bytes(getattr(fields, name))
    if isinstance(fields.messages, list):
        for message in fields.messages:
            yield bytes(message)
    for name in ("prompt", "input", "text", "token_ids", "inputs"):
        # Without the quotation mark or bracket at its end, which a longer one has not.
        yield _bytes(getattr(fields, name))[:-1]


def _bytes(value: Raw | UnsetType) -> bytes:
    return b"" if isinstance(value, UnsetType) else bytes(value)


def _is_set(value: Raw | UnsetType) -> bool:
    return _bytes(value) not in (b"", b"null")


def _text(value: Raw | UnsetType) -> str | None:
    """A JSON text; None for anything else."""
    if not _bytes(value).startswith(b'"'):
        return None
    try:
        return msgspec.json.decode(_bytes(value), type=str)[:_MOST_NAME] or None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
