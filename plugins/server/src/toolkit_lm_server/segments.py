"""An answer to a chat as successive segments: reasoning, text, tool calls. APIs other than chat
completions are made of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from toolkit_lm_server.chat import ChatAnswer


@dataclass(slots=True)
class Segment:
    """A part of an answer, of one kind."""

    kind: Literal["reasoning", "text", "call"]
    number: int
    """The segment's place among the answer's segments."""
    id: str = ""
    """Id of a tool call. The function's name is in `name`."""
    name: str = ""
    is_custom: bool = False
    """A call of a custom tool, whose text is its input."""
    parts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Log probabilities of a text's tokens, as chat completions have them."""

    @property
    def text(self) -> str:
        """The segment's text so far. A call's text is the JSON of its arguments."""
        return "".join(self.parts)


class Step(NamedTuple):
    """An event of a segment: it begins, goes on, or ends."""

    phase: Literal["begin", "more", "end"]
    segment: Segment
    text: str = ""
    """The new text of the segment."""
    logprobs: Sequence[dict[str, Any]] = ()


class Segments:
    """Reads an answer of one choice."""

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._open: Segment | None = None
        self._calls: dict[int, Segment] = {}

    async def read(self, answer: ChatAnswer) -> AsyncGenerator[list[Step], None]:
        """The steps of a stream, as they come. Raises ApiError."""
        async with aclosing(answer.chunks()) as pieces:
            async for chunks in pieces:
                yield [
                    step
                    for chunk in chunks
                    for choice in chunk["choices"]
                    for step in self._push(choice["delta"], choice)
                ]
        yield self._end()

    def read_whole(self, completion: Mapping[str, Any]) -> None:
        """Reads a whole answer, as ChatAnswer.whole gives it."""
        [choice] = completion["choices"]
        self._push(choice["message"], choice)
        self._end()

    def _push(self, delta: Mapping[str, Any], choice: Mapping[str, Any]) -> list[Step]:
        """The steps of a `delta`, which is a chunk's or a whole message."""
        steps: list[Step] = []
        content = delta.get("content") or ""
        calls = delta.get("tool_calls") or ()
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            self._more(steps, "reasoning", reasoning)
        if content or (logprobs and not reasoning and not calls):
            self._more(steps, "text", content, logprobs)
        for place, call in enumerate(calls):
            self._call(steps, call.get("index", place), call)
        if choice.get("finish_reason") is not None:
            self.finish_reason = choice["finish_reason"]
            self.stop_reason = choice.get("stop_reason")
        return steps

    def _more(
        self,
        steps: list[Step],
        kind: Literal["reasoning", "text"],
        text: str,
        logprobs: list[dict[str, Any]] | None = None,
    ) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(steps, Segment(kind, len(self.all)))
        assert self._open is not None
        self._add(steps, self._open, text, logprobs or [])

    def _call(self, steps: list[Step], index: int, call: Mapping[str, Any]) -> None:
        is_custom = call.get("type") == "custom"
        function = call.get("custom" if is_custom else "function") or {}
        if index not in self._calls:
            self._calls[index] = Segment(
                "call", len(self.all), call.get("id") or "", function.get("name") or "", is_custom
            )
            self._begin(steps, self._calls[index])
        if arguments := function.get("input" if is_custom else "arguments"):
            self._add(steps, self._calls[index], arguments, [])

    def _begin(self, steps: list[Step], segment: Segment) -> None:
        steps += self._end()
        self.all.append(segment)
        self._open = segment
        steps.append(Step("begin", segment))

    def _add(
        self, steps: list[Step], segment: Segment, text: str, logprobs: list[dict[str, Any]]
    ) -> None:
        segment.parts.append(text)
        segment.logprobs += logprobs
        steps.append(Step("more", segment, text, logprobs))

    def _end(self) -> list[Step]:
        steps = [] if self._open is None else [Step("end", self._open)]
        self._open = None
        return steps
