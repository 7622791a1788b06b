"""Responses of /api/chat and /api/generate: one object, or one per line."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from toolkit_lm_server.chat import ChatAnswer
from toolkit_lm_server.event_stream import telling
from toolkit_lm_server.generation import Generation
from toolkit_lm_server.segments import Segments, Step

_LARGE = 1_000
"""Parts of an answer whose joining would be felt on the event loop."""


class Clock:
    """How long an answer takes. Ollama tells it in nanoseconds."""

    def __init__(self) -> None:
        self._start = time.perf_counter_ns()
        self._first = self._start

    def first(self) -> None:
        """The prompt is computed, and the first token is there."""
        self._first = time.perf_counter_ns()

    def figures(self, usage: Mapping[str, Any]) -> dict[str, int]:
        """Counts and durations for the end of an answer. `usage`: in the form of chat
        completions."""
        end = time.perf_counter_ns()
        return {
            "total_duration": end - self._start,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": self._first - self._start,
            "eval_count": usage["completion_tokens"],
            "eval_duration": end - self._first,
        }


class AnswerParts(Protocol):
    """An answer on its way: what is new, in Ollama's form, then why it ended."""

    @property
    def finish_reason(self) -> str | None: ...

    def parts(self) -> AsyncGenerator[list[dict[str, Any]], None]: ...

    def usage(self) -> dict[str, Any]: ...


class ChatAnswerParts:
    """Parts of a chat's message."""

    def __init__(self, answer: ChatAnswer, *, thinks: bool) -> None:
        """`thinks`: the message shows reasoning."""
        self._answer = answer
        self._segments = Segments()
        self._thinks = thinks
        self.usage = answer.usage

    @property
    def finish_reason(self) -> str | None:
        return self._segments.finish_reason

    async def parts(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Raises ApiError."""
        async with aclosing(self._segments.read(self._answer)) as found:
            async for steps in found:
                yield [part for step in steps if (part := self._part(step))]

    def _part(self, step: Step) -> dict[str, Any]:
        match step.segment.kind, step.phase:
            case "text", "more":
                return {"content": step.text}
            case "reasoning", "more" if self._thinks:
                return {"content": "", "thinking": step.text}
            case "call", "end":
                return {"content": "", "tool_calls": [_call(step)]}
        return {}


class CompletionParts:
    """Parts of a plain completion's text."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.finish_reason: str | None = None
        self.usage = generation.usage

    async def parts(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Raises ApiError."""
        async with aclosing(self._generation.pieces()) as found:
            async for pieces in found:
                for piece in pieces:
                    self.finish_reason = piece.finish_reason or self.finish_reason
                yield [{"content": piece.text} for piece in pieces if piece.text]


class Output:
    """Objects of Ollama's."""

    def __init__(self, model: str, parts: AnswerParts, clock: Clock, *, is_chat: bool) -> None:
        self._model = model
        self._parts = parts
        self._clock = clock
        self._is_chat = is_chat
        self._read: list[dict[str, Any]] = []

    async def read(self) -> None:
        """Takes the whole answer in. Raises ApiError."""
        async with aclosing(self._parts.parts()) as found:
            async for parts in found:
                self._read += parts

    @property
    def is_large(self) -> bool:
        """Whether the response is so large that building its object takes noticeable time."""
        return len(self._read) > _LARGE

    def whole(self) -> dict[str, Any]:
        """After `read`."""
        joined = {
            name: "".join(part.get(name, "") for part in self._read)
            for name in ("content", "thinking")
        }
        calls = [call for part in self._read for call in part.get("tool_calls", ())]
        part = {"content": joined["content"]} | (
            {"thinking": joined["thinking"]} if joined["thinking"] else {}
        )
        return self._object(part | ({"tool_calls": calls} if calls else {})) | self._end()

    def lines(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Each part as it comes, then the figures."""
        return telling(self._lines(), lambda error: {"error": error.body["error"]["message"]})

    async def _lines(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        async with aclosing(self._parts.parts()) as found:
            async for parts in found:
                yield [self._object(part) | {"done": False} for part in parts]
        yield [self._object({"content": ""}) | self._end()]

    def _object(self, part: dict[str, Any]) -> dict[str, Any]:
        if self._is_chat:
            fields: dict[str, Any] = {"message": {"role": "assistant", **part}}
        else:
            fields = {"response": part["content"]} | (
                {"thinking": part["thinking"]} if "thinking" in part else {}
            )
        return {"model": self._model, "created_at": now(), **fields}

    def _end(self) -> dict[str, Any]:
        reason = "stop" if self._parts.finish_reason in ("stop", "tool_calls") else "length"
        return {"done": True, "done_reason": reason, **self._clock.figures(self._parts.usage())}


def now() -> str:
    """The current time in Ollama's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _call(step: Step) -> dict[str, Any]:
    return {
        "function": {
            "name": step.segment.name,
            "arguments": msgspec.json.decode(step.segment.text, type=dict[str, Any]),
        }
    }
