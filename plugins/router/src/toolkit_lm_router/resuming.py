"""Streams that break off on one backend and go on on another, as if nothing had happened.

The other backend gets the same request with the same seed, and the tokens so far, which it computes
many at a time. Its stream is the same from the beginning. What the client has is left out of it,
and compared by digest: the client gets one stream, or an error, and never a mixture of two answers.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec

_TEXTS = ("text", "content", "reasoning_content", "reasoning", "refusal")
"""Fields of a choice, or of its delta, that grow from event to event."""
_HEAD = ("id", "created", "system_fingerprint")
"""Fields of each event that another server has others for."""
_DIED = "engine_"
"""The beginning of the codes of errors that tell of an engine's end."""
_DATA = b"data:"
_IDS = re.compile(rb',\s*"(prompt_)?token_ids":\s*\[[0-9,\s]*\]')
"""Token ids in an event of ours. A text cannot look so: its quotation marks are escaped."""

_encode = msgspec.json.Encoder().encode


class DivergedError(Exception):
    """The other backend gives another answer than the first one had begun."""


class DiedError(Exception):
    """The stream itself tells that its engine has died."""


class _Run:
    """A text, or a list of values, that grows."""

    __slots__ = ("_digest", "_length", "_replayed", "_state")

    def __init__(self) -> None:
        self._state = blake2b(digest_size=16)
        self._length = 0
        """Characters or values that the client has."""
        self._replayed = 0
        self._digest = self._state

    def replay(self) -> None:
        """The same comes once more, from the beginning."""
        self._digest = blake2b(digest_size=16)
        self._replayed = 0

    def new(self, value: Any) -> Any:
        """The part of `value`, which comes next, that the client has not. Raises
        DivergedError."""
        left = self._length - self._replayed
        if left:
            self._digest.update(_bytes(value[:left]))
            self._replayed += len(value[:left])
            if self._replayed < self._length:
                return value[:0]
            if self._digest.digest() != self._state.digest():
                raise DivergedError
            self._digest = self._state
            value = value[left:]
        self._state.update(_bytes(value))
        self._digest = self._state
        self._length += len(value)
        self._replayed = self._length
        return value

    @property
    def is_behind(self) -> bool:
        return self._replayed < self._length


class _Choice:
    """The part of a choice that the client has."""

    def __init__(self) -> None:
        self.runs: dict[object, _Run] = {}
        self.seen: set[object] = set()
        """Fields that come once, and have come."""

    def new(self, key: object, value: Any) -> Any:
        run = self.runs.get(key)
        if run is None:
            run = self.runs[key] = _Run()
        return run.new(value)

    def first(self, key: object) -> bool:
        """Whether it comes for the first time."""
        is_first = key not in self.seen
        self.seen.add(key)
        return is_first


class Stream:
    """An answer's stream of events, over all backends that make it."""

    def __init__(self, *, hides_ids: bool = False) -> None:
        """`hides_ids`: the router has asked for token ids, and the client has not."""
        self._hides_ids = hides_ids
        self.token_ids = array("i")
        """Tokens of the first choice so far; empty where they are not known."""
        self._choices: dict[int, _Choice] = {}
        self._head: dict[str, Any] = {}
        self._is_replay = False
        self.is_done = False
        """The last event has come."""

    def replay(self) -> None:
        """Another backend begins from the beginning."""
        self._is_replay = bool(self._choices)
        for choice in self._choices.values():
            for run in choice.runs.values():
                run.replay()

    def pass_on(self, events: bytes) -> Iterator[bytes]:
        """What the client gets of some whole events. Raises DivergedError and DiedError after what
        comes before."""
        if not self._is_replay:
            # The bytes as they came, up to an event that tells of the engine's end.
            for event in _split(events):
                has_more = self._read(event)
                if not self._hides_ids:
                    yield event
                elif has_more:
                    yield _IDS.sub(b"", event)
            return
        for event in _split(events):
            data = _object(event)
            if data is None:
                if _is_done(event):
                    self._check_end()
                yield event
            elif (made := self._trimmed(data)) is not None:
                made_event = b"data: %b\n\n" % _encode(made)
                yield _IDS.sub(b"", made_event) if self._hides_ids else made_event

    def _read(self, event: bytes) -> bool:
        """Takes note of an event. Returns whether it has more than token ids."""
        data = _object(event)
        if data is None:
            self.is_done = self.is_done or _is_done(event)
            return True
        self._head = self._head or {name: data[name] for name in _HEAD if name in data}
        return self._trimmed(data) is not None

    def _check_end(self) -> None:
        self.is_done = True
        if any(run.is_behind for c in self._choices.values() for run in c.runs.values()):
            raise DivergedError

    def _trimmed(self, data: dict[str, Any]) -> dict[str, Any] | None:
        """An event without what the client has. None: it has all of it."""
        error = data.get("error")
        if isinstance(error, dict) and str(error.get("code")).startswith(_DIED):
            raise DiedError
        if self._is_replay:
            data |= {name: value for name, value in self._head.items() if name in data}
        choices = data.get("choices")
        if not choices:
            return data
        data["choices"] = [made for c in choices if (made := self._new_part(c)) is not None]
        return data if data["choices"] else None

    def _new_part(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """The part of a choice's event that the client has not. None: nothing."""
        known = self._choices.setdefault(choice.get("index", 0), _Choice())
        parts = choice["delta"] if isinstance(choice.get("delta"), dict) else choice
        is_new = False
        for name in _TEXTS:
            if isinstance(text := parts.get(name), str):
                new = known.new(name, text)
                is_new = is_new or bool(new)
                parts[name] = new
        if calls := parts.get("tool_calls"):
            parts["tool_calls"] = [
                made for call in calls if (made := _new_call(known, call)) is not None
            ]
            is_new = is_new or bool(parts["tool_calls"])
            if not parts["tool_calls"]:
                del parts["tool_calls"]
        if "role" in parts:
            is_new = known.first("role") or is_new
        if "prompt_token_ids" in choice and not known.first("prompt_token_ids"):
            del choice["prompt_token_ids"]
        if choice.get("token_ids"):
            new = choice["token_ids"] = known.new("token_ids", choice["token_ids"])
            is_new = is_new or (bool(new) and not self._hides_ids)
            if not choice.get("index", 0):
                self.token_ids.extend(new)
        if isinstance(choice.get("logprobs"), dict):
            choice["logprobs"], more = _new_logprobs(known, choice["logprobs"])
            is_new = is_new or more
        if choice.get("finish_reason") is not None:
            if any(run.is_behind for run in known.runs.values()):
                raise DivergedError
            is_new = known.first("finish_reason") or is_new
        return choice if is_new else None


def _new_call(known: _Choice, call: dict[str, Any]) -> dict[str, Any] | None:
    """The part of a tool call that the client has not. Ids are random: the first stays."""
    place = call.get("index", 0)
    is_first = known.first(("call", place))
    is_new = is_first
    if not is_first:
        call = {name: value for name, value in call.items() if name not in ("id", "type")}
    for kind, name in (("function", "arguments"), ("custom", "input")):
        if isinstance(inner := call.get(kind), dict):
            inner = dict(inner)
            if isinstance(inner.get(name), str):
                inner[name] = known.new(("call", place, name), inner[name])
                is_new = is_new or bool(inner[name])
            if not is_first:
                inner.pop("name", None)
            call = call | {kind: inner}
    return call if is_new else None


def _new_logprobs(known: _Choice, logprobs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Log probabilities that the client has not, and whether there are any. Their values may differ
    in the last bits: they are counted, not compared."""
    made = dict(logprobs)
    is_new = False
    for name, values in logprobs.items():
        if isinstance(values, list):
            run = known.new(("logprobs", name), [None] * len(values))
            made[name] = values[len(values) - len(run) :]
            is_new = is_new or bool(run)
    return made, is_new


def _bytes(value: Any) -> bytes:
    if isinstance(value, str):
        # Halves of characters come from JSON's escapes.
        return value.encode(errors="surrogatepass")
    return b"".join(b"%d," % item for item in value if item is not None)


def _split(events: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in events.split(b"\n\n") if event]


def _object(event: bytes) -> dict[str, Any] | None:
    """The JSON object of an event. None: it has none."""
    if not event.startswith(_DATA):
        return None
    try:
        data = msgspec.json.decode(event[len(_DATA) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _is_done(event: bytes) -> bool:
    return event.startswith(_DATA) and event[len(_DATA) :].strip() == b"[DONE]"
