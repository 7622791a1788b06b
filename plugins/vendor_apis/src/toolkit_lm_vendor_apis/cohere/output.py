"""Responses of /v2/chat: a message, or the events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from toolkit_lm_server.chat import ChatAnswer
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.event_stream import NamedEvents, telling
from toolkit_lm_server.generation import ChoicePiece
from toolkit_lm_server.segments import Segment, Segments, Step

_REASONS = {"length": "MAX_TOKENS", "timeout": "TIMEOUT", "tool_calls": "TOOL_CALL"}
_TYPES = {"text": "text", "reasoning": "thinking"}


class Output:
    """A message on its way."""

    def __init__(self, answer: ChatAnswer, *, tells_logprobs: bool) -> None:
        self._answer = answer
        self._id = str(uuid.uuid4())
        self._segments = Segments()
        self._tells_logprobs = tells_logprobs

    def whole(self, choices: Sequence[ChoicePiece]) -> dict[str, Any]:
        """`choices`: those of the answer. It takes a while where they are large."""
        self._segments.read_whole(self._answer.whole(choices))
        content = [
            {"type": _TYPES[segment.kind], _TYPES[segment.kind]: segment.text}
            for segment in self._segments.all
            if segment.kind != "call"
        ]
        calls = [
            _call(segment, segment.text) for segment in self._segments.all if segment.kind == "call"
        ]
        message: dict[str, Any] = (
            {"role": "assistant"}
            | ({"content": content} if content else {})
            | ({"tool_calls": calls} if calls else {})
        )
        logprobs = {"logprobs": self._logprobs()} if self._tells_logprobs else {}
        return {
            "id": self._id,
            "message": message,
            "finish_reason": self._reason(),
            "usage": self._usage(),
            **logprobs,
        }

    async def events(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Events of the stream, in the order of Cohere's API."""
        numbers: dict[int, int] = {}
        message: dict[str, Any] = {
            "role": "assistant",
            "content": [],
            "tool_plan": "",
            "tool_calls": [],
            "citations": [],
        }
        yield [{"type": "message-start", "id": self._id, "delta": {"message": message}}]
        async with aclosing(
            telling(
                self._remaining_events(numbers), lambda error: _ended(self._id, _failure(error))
            )
        ) as found:
            async for events in found:
                yield events

    async def _remaining_events(
        self, numbers: dict[int, int]
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Events after the first one. Raises ApiError."""
        async with aclosing(self._segments.read(self._answer)) as found:
            async for steps in found:
                yield [_event(step, numbers, self._tells_logprobs) for step in steps]
        yield [_ended(self._id, {"finish_reason": self._reason(), "usage": self._usage()})]

    def _reason(self) -> str:
        reason = self._segments.finish_reason
        if reason == "stop":
            has_calls = any(segment.kind == "call" for segment in self._segments.all)
            if has_calls:
                return "TOOL_CALL"
            is_stopped = isinstance(self._segments.stop_reason, str)
            return "STOP_SEQUENCE" if is_stopped else "COMPLETE"
        return _REASONS.get(reason or "", "ERROR")

    def _usage(self) -> dict[str, Any]:
        usage = self._answer.usage()
        tokens = {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
        }
        return {
            "billed_units": tokens,
            "tokens": tokens,
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        }

    def _logprobs(self) -> list[dict[str, Any]]:
        return [_logprob(logprob) for segment in self._segments.all for logprob in segment.logprobs]


def _event(step: Step, numbers: dict[int, int], tells_logprobs: bool) -> dict[str, Any]:
    """`numbers`: by segment, its index."""
    segment = step.segment
    if segment.number not in numbers:
        numbers[segment.number] = len(numbers)
    place = {"index": numbers[segment.number]}
    if segment.kind == "call":
        match step.phase:
            case "begin":
                return {
                    "type": "tool-call-start",
                    **place,
                    "delta": {"message": {"tool_calls": _call(segment, "")}},
                }
            case "more":
                delta = {"tool_calls": {"function": {"arguments": step.text}}}
                return {"type": "tool-call-delta", **place, "delta": {"message": delta}}
            case "end":
                return {"type": "tool-call-end", **place}
    kind = _TYPES[segment.kind]
    match step.phase:
        case "begin":
            return {
                "type": "content-start",
                **place,
                "delta": {"message": {"content": {"type": kind, kind: ""}}},
            }
        case "more":
            logprobs = (
                {"logprobs": _logprob(step.logprobs[0])} if tells_logprobs and step.logprobs else {}
            )
            return {
                "type": "content-delta",
                **place,
                "delta": {"message": {"content": {kind: step.text}}},
                **logprobs,
            }
        case "end":
            return {"type": "content-end", **place}


def _call(segment: Segment, arguments: str) -> dict[str, Any]:
    return {
        "id": segment.id,
        "type": "function",
        "function": {"name": segment.name, "arguments": arguments},
    }


def _logprob(logprob: dict[str, Any]) -> dict[str, Any]:
    return {"text": logprob["token"], "token_ids": [], "logprobs": [logprob["logprob"]]}


def _ended(name: str, delta: dict[str, Any]) -> dict[str, Any]:
    """The last event of the message of this id."""
    return {"type": "message-end", "id": name, "delta": delta}


def _failure(error: ApiError) -> dict[str, Any]:
    return {"finish_reason": "ERROR", "error": error.body["error"]["message"]}


class ChatEvents(NamedEvents):
    """A stream of a message."""

    @staticmethod
    def failure(error: ApiError) -> dict[str, Any]:
        return _ended(str(uuid.uuid4()), _failure(error))
