"""Answers of /v1/responses: a response, or the events that build it."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from toolkit_lm_server.chat import ChatAnswer
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.event_stream import NamedEvents, telling
from toolkit_lm_server.generation import ChoicePiece
from toolkit_lm_server.responses.body import ResponsesBody
from toolkit_lm_server.responses.items import shown_tools
from toolkit_lm_server.segments import Segment, Segments, Step

_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc"}
_PART = {"reasoning": "reasoning_text", "text": "output_text"}
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class Output:
    """A response that is being made."""

    def __init__(self, body: ResponsesBody, model: str, *, is_kept: bool) -> None:
        """`is_kept`: later requests can name the response. Set `answer` before it is read."""
        self.id = f"resp_{uuid.uuid4().hex}"
        self._body = body
        self.answer: ChatAnswer | None = None
        self._model = model
        self._is_kept = is_kept
        self._created = int(time.time())
        self._segments = Segments()
        self._ids: list[str] = []
        """Ids of the output's items, by segment."""
        self._messages: dict[str, Any] = {}
        """The prompt and the output as the model read and drew them, where asked for."""

    def again(self) -> Output:
        """Another output of the same request, for one more answer of the model."""
        return Output(self._body, self._model, is_kept=self._is_kept)

    def whole(self, choices: Sequence[ChoicePiece]) -> dict[str, Any]:
        """The whole response, made of the answer's `choices`. It takes a while where they are
        large."""
        assert self.answer is not None
        self._segments.read_whole(self.answer.whole(choices))
        if self._body.enable_response_messages:
            names = ("input_messages", "output_messages")
            for name, (text, tokens) in zip(names, self.answer.raw(choices[0]), strict=True):
                self._messages[name] = [
                    {"type": "raw_message_tokens", "message": text, "tokens": tokens}
                ]
        return self._finished()

    def state(self, status: str) -> dict[str, Any]:
        """The response without output: "queued", "in_progress", "cancelled"."""
        return self._response(status, [])

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The response that an error ended."""
        body = {"code": _code(error), "message": error.body["error"]["message"]}
        return self._response("failed", self._items("incomplete"), error=body)

    async def events(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The events of a stream, in the order of OpenAI's. The last event has the whole
        response."""
        number = 0
        async with aclosing(self._unnumbered()) as found:
            async for events in found:
                yield [
                    {**event, "sequence_number": number + place}
                    for place, event in enumerate(events)
                ]
                number += len(events)

    async def _unnumbered(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        begun = self.state("in_progress")
        yield [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        async with aclosing(telling(self._events_after_start(), self._failure)) as found:
            async for events in found:
                yield events

    async def _events_after_start(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The events after the beginning. Raises ApiError."""
        assert self.answer is not None
        async with aclosing(self._segments.read(self.answer)) as found:
            async for steps in found:
                yield [event for step in steps for event in self._events(step)]
        yield [_final(self._finished())]

    def _failure(self, error: ApiError) -> dict[str, Any]:
        return _final(self.failed(error))

    def _events(self, step: Step) -> list[dict[str, Any]]:
        segment = step.segment
        text = step.segment.text if step.phase == "end" else step.text
        item = {"output_index": segment.number}
        if step.phase == "begin":
            self._ids.append(_id_of(segment))
        place = {"item_id": self._ids[segment.number], **item}
        added = {
            "type": "response.output_item.added",
            **item,
            "item": self._item(segment, "in_progress", begun=True),
        }
        done = {
            "type": "response.output_item.done",
            **item,
            "item": self._item(segment, "completed"),
        }
        if segment.kind == "call":
            event = "response.function_call_arguments"
            whole = {"name": segment.name, "arguments": text}
            if segment.is_custom:
                event = "response.custom_tool_call_input"
                whole = {"input": text}
            match step.phase:
                case "begin":
                    return [added]
                case "more":
                    return [{"type": f"{event}.delta", **place, "delta": text}]
                case "end":
                    return [{"type": f"{event}.done", **place, **whole}, done]
        event, place = f"response.{_PART[segment.kind]}", {**place, "content_index": 0}
        tokens = segment.logprobs if step.phase == "end" else step.logprobs
        logprobs = (
            {"logprobs": tokens if self._body.tells_logprobs else []}
            if segment.kind == "text"
            else {}
        )
        match step.phase:
            case "begin":
                return [
                    added,
                    {
                        "type": "response.content_part.added",
                        **place,
                        "part": self._part(segment, begun=True),
                    },
                ]
            case "more":
                return [{"type": f"{event}.delta", **place, "delta": text, **logprobs}]
            case "end":
                return [
                    {"type": f"{event}.done", **place, "text": text, **logprobs},
                    {"type": "response.content_part.done", **place, "part": self._part(segment)},
                    done,
                ]

    def _item(self, segment: Segment, status: str, *, begun: bool = False) -> dict[str, Any]:
        """A segment as an item of the output. `begun`: the item is still empty."""
        item: dict[str, Any] = {"id": self._ids[segment.number], "status": status}
        match segment.kind:
            case "call":
                kind = "custom_tool_call" if segment.is_custom else "function_call"
                field = "input" if segment.is_custom else "arguments"
                text = "" if begun else segment.text
                call = {"call_id": segment.id, "name": segment.name, field: text}
                return {"type": kind, **item, **call}
            case "reasoning":
                content = [] if begun else [self._part(segment)]
                return {
                    "type": "reasoning",
                    **item,
                    "summary": [],
                    "content": content,
                    "encrypted_content": None,
                }
            case "text":
                return {
                    "type": "message",
                    **item,
                    "role": "assistant",
                    "content": [] if begun else [self._part(segment)],
                }

    def _part(self, segment: Segment, *, begun: bool = False) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PART[segment.kind], "text": "" if begun else segment.text}
        if segment.kind == "text":
            part |= {
                "annotations": [],
                "logprobs": segment.logprobs if self._body.tells_logprobs and not begun else [],
            }
        return part

    def _items(self, last: str) -> list[dict[str, Any]]:
        """The items of the output. `last`: the status of the last one, unless it is a call: calls
        are whole."""
        segments = self._segments.all
        self._ids += [_id_of(segment) for segment in segments[len(self._ids) :]]
        return [
            self._item(
                segment, last if segment is segments[-1] and segment.kind != "call" else "completed"
            )
            for segment in segments
        ]

    def _finished(self) -> dict[str, Any]:
        reason = self._segments.finish_reason
        if reason in ("stop", "tool_calls"):
            return self._response("completed", self._items("completed"), usage=self._usage())
        details = {"reason": "max_output_tokens" if reason == "length" else reason}
        return self._response(
            "incomplete", self._items("incomplete"), incomplete_details=details, usage=self._usage()
        )

    def _usage(self) -> dict[str, Any]:
        assert self.answer is not None
        usage = self.answer.usage()
        reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
        }

    def _response(
        self, status: str, output: Sequence[Mapping[str, Any]], **more: Any
    ) -> dict[str, Any]:
        body = self._body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": bool(body.background),
            "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None} | (body.reasoning or {}),
            "service_tier": "default",
            "store": self._is_kept,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}} | (body.text or {}),
            "tool_choice": body.tool_choice or "auto",
            "tools": shown_tools(body.tools or ()),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            **self._messages,
            **more,
        }


class ResponseEvents(NamedEvents):
    """A stream of a response. A failure before its beginning is an event of its own."""

    @staticmethod
    def failure(error: ApiError) -> dict[str, Any]:
        body = error.body["error"]
        return {
            "type": "error",
            "code": _code(error),
            "message": body["message"],
            "param": body["param"],
            "sequence_number": 0,
        }


def _id_of(segment: Segment) -> str:
    """A new id for an item of the output."""
    prefix = "ctc" if segment.is_custom else _PREFIX[segment.kind]
    return f"{prefix}_{uuid.uuid4().hex}"


def _final(response: dict[str, Any]) -> dict[str, Any]:
    """The last event, with the whole response."""
    return {"type": f"response.{response['status']}", "response": response}


def _code(error: ApiError) -> str:
    return _CODES.get(error.status, "server_error")
