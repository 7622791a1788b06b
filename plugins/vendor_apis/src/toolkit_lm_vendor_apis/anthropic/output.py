"""Responses of /v1/messages: a message, or the events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from toolkit_lm_server.chat import ChatAnswer
from toolkit_lm_server.event_stream import NamedEvents, telling
from toolkit_lm_server.generation import ChoicePiece
from toolkit_lm_server.segments import Segment, Segments, Step

from toolkit_lm_vendor_apis.anthropic.errors import error_body

_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class Output:
    """A message on its way."""

    def __init__(
        self,
        answer: ChatAnswer,
        model: str,
        *,
        thinks: bool,
        retention: str | None = None,
        block_size: int | None = None,
    ) -> None:
        """`thinks`: the message shows reasoning. `retention`: the time for which the request asks
        to keep its prompt. `block_size`: tokens of a block of the prefix cache; None: there is no
        cache."""
        self._retention = retention
        self._block_size = block_size
        self._answer = answer
        self._head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._segments = Segments()
        self._thinks = thinks

    def whole(self, choices: Sequence[ChoicePiece]) -> dict[str, Any]:
        """`choices`: those of the answer. It takes a while where they are large."""
        found = self._answer.whole(choices)
        prompt = found.get("prompt_token_ids")
        tokens = {"prompt_token_ids": prompt, "token_ids": choices[0].token_ids} if prompt else {}
        self._segments.read_whole(found)
        content = [
            self._block(segment) for segment in self._segments.all if self._is_reported(segment)
        ]
        made = {**self._head, "content": content, **self._stop(), "usage": self._usage()}
        return made | tokens

    def events(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Events of the stream, in the order of Anthropic's API."""
        return telling(self._events(), error_body)

    async def _events(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        begun = False
        numbers: dict[int, int] = {}
        async with aclosing(self._segments.read(self._answer)) as found:
            async for steps in found:
                events = [
                    event
                    for step in steps
                    if self._is_reported(step.segment)
                    for event in _events(step, numbers)
                ]
                if events and not begun:
                    begun = True
                    events.insert(0, self._start())
                yield events
        if not begun:
            yield [self._start()]
        yield [
            {"type": "message_delta", "delta": self._stop(), "usage": self._usage()},
            {"type": "message_stop"},
        ]

    def _is_reported(self, segment: Segment) -> bool:
        return self._thinks or segment.kind != "reasoning"

    def _start(self) -> dict[str, Any]:
        usage = {**self._usage(), "output_tokens": 0}
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return {"type": "message_start", "message": message}

    def _block(self, segment: Segment) -> dict[str, Any]:
        if segment.kind != "call":
            return _begun(segment) | {_DELTAS[segment.kind][1]: segment.text}
        return _begun(segment) | {"input": msgspec.json.decode(segment.text, type=dict[str, Any])}

    def _stop(self) -> dict[str, Any]:
        reason = self._segments.finish_reason
        stop = self._segments.stop_reason
        if reason not in ("stop", "tool_calls"):
            stop_reason = "max_tokens"
        elif any(segment.kind == "call" for segment in self._segments.all):
            stop_reason = "tool_use"
        else:
            stop_reason = "stop_sequence" if isinstance(stop, str) else "end_turn"
        return {
            "stop_reason": stop_reason,
            "stop_sequence": stop if stop_reason == "stop_sequence" else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._answer.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        prompt = usage["prompt_tokens"]
        created = 0
        if self._retention is not None and self._block_size is not None:
            # The same prompt would find so much: its last token is always computed.
            found = (prompt - 1) // self._block_size * self._block_size
            created = max(0, found - cached)
        return {
            "input_tokens": prompt - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "cache_creation": {
                "ephemeral_5m_input_tokens": created if self._retention == "5m" else 0,
                "ephemeral_1h_input_tokens": created if self._retention == "1h" else 0,
            },
            "output_tokens": usage["completion_tokens"],
        }


def _events(step: Step, numbers: dict[int, int]) -> list[dict[str, Any]]:
    """`numbers`: by segment, the number of its block."""
    segment = step.segment
    place = {"index": numbers.setdefault(segment.number, len(numbers))}
    match step.phase:
        case "begin":
            return [{"type": "content_block_start", **place, "content_block": _begun(segment)}]
        case "more":
            kind, name = _DELTAS[segment.kind]
            return [
                {"type": "content_block_delta", **place, "delta": {"type": kind, name: step.text}}
            ]
        case "end":
            return [{"type": "content_block_stop", **place}]


def _begun(segment: Segment) -> dict[str, Any]:
    """A block with nothing in it."""
    match segment.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            # Nobody signs it.
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": segment.id, "name": segment.name, "input": {}}


class MessageEvents(NamedEvents):
    """A stream of a message."""

    comment = b'event: ping\ndata: {"type": "ping"}\n\n'
    failure = staticmethod(error_body)
