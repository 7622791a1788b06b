"""Harmony: the channels of gpt-oss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolkit_lm.renderer import AnswerParser, StopScope

from toolkit_lm_parsers.json_calls import JsonCalls
from toolkit_lm_parsers.marks import MarkedReasoning, Marks
from toolkit_lm_parsers.reading import Reading
from toolkit_lm_parsers.scanning import scope_of
from toolkit_lm_parsers.structures import ANY_TEXT, Structure, calls, choice, sequence, tag

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_CONSTRAIN = "<|constrain|>"
_END = "<|end|>"
_CALL = "<|call|>"
_RETURN = "<|return|>"
_BREAKS = (_START, _CHANNEL, _MESSAGE, _END, _CALL, _RETURN)
_AFTER_HEADER = (_START, _END, _CALL, _RETURN)
"""Marks that show that a header is not followed by a message."""
_FUNCTIONS = "functions."
_MOST_HEADER = 1024
_CHANNELS = ("analysis", "commentary", "final")


class HarmonyParser(JsonCalls):
    """Messages, each with a header: the channel analysis is reasoning, one to a function is a call,
    all other is content."""

    ends = _BREAKS

    def __init__(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(tools)
        _, has_start, header = prompt_end.rpartition(_START)
        self._header = header if has_start else ""
        """Header of the message that the prompt has begun."""

    def run(self) -> Reading[None]:
        header = self._header
        if _MESSAGE in header:
            # The prompt ends in the message.
            header, _, _ = header.partition(_MESSAGE)
            yield from self._body(header)
            header = ""
        while True:
            is_header = yield from self._begins_header()
            if self.at_end:
                return
            if not is_header:
                # Text between messages.
                yield from self._body("")
                header = ""
                continue
            read: list[str] = []
            yield from self.spaces()
            yield from self.accept(_START)
            mark = yield from self.until((_MESSAGE, *_AFTER_HEADER), read.append)
            header = (header + "".join(read))[-_MOST_HEADER:]
            if mark == _MESSAGE:
                yield from self._body(header)
            else:
                self.at -= len(mark) if mark == _START else 0
                self._lacks_message(header, is_cut=mark is None and self.cut)
            header = ""

    def _begins_header(self) -> Reading[bool]:
        """Whether a message begins with a mark. One that does not is content."""
        self.keep()
        yield from self.spaces()
        found = yield from self.accept_any((_CHANNEL, _START, "to="))
        self.go_back()
        return found is not None

    def _lacks_message(self, header: str, *, is_cut: bool) -> None:
        """A header that no message follows: a text in it is content."""
        if "to=" in header or is_cut:
            self.lacks_call |= is_cut and "to=" in header
            return
        _, _, after = header.rpartition(_CHANNEL)
        words = after.split(_CONSTRAIN)[0].split(maxsplit=1)
        if len(words) == 2:
            self.separate()
            (self.think if words[0] == "analysis" else self.say)(
                words[1] if words[0] in _CHANNELS else " ".join(words)
            )

    def _body(self, header: str) -> Reading[None]:
        """A message's own text, up to the mark that ends it."""
        before, _, after = header.partition(_CHANNEL)
        to = next(
            (
                word[3:]
                for word in f"{before} {after}".replace("<", " <").split()
                if word.startswith("to=")
            ),
            "",
        )
        channel = after.split("<")[0].split()
        if to and (to.startswith(_FUNCTIONS) or to in self.functions):
            yield from self._call(to.removeprefix(_FUNCTIONS))
            return
        self.separate()
        # The model's message to one of its own tools is not part of the answer.
        is_thought = (channel and channel[0] == "analysis") or to not in ("", "user", "all")
        yield from self._end(self.think if is_thought else self.say)

    def _end(self, sink: Callable[[str], None]) -> Reading[None]:
        """The rest of a message. What begins the next one is its own."""
        mark = yield from self.until(_BREAKS, sink)
        if mark in (_START, _CHANNEL):
            self.at -= len(mark)

    def _call(self, name: str) -> Reading[None]:
        """Reads the arguments of a call. Text that is not JSON becomes content."""
        self.keep()
        yield from self.spaces()
        is_empty = (yield from self.comes(_BREAKS)) or (self.at_end and not self.cut)
        arguments = "{}" if is_empty else (yield from self.json_arguments(name))
        if arguments is not None and self.call(name, arguments):
            yield from self.spaces()
        elif self.is_cut:
            self.lacks_call = True
            self.skip()
        else:
            self.separate()
        self.go_back()
        yield from self._end(self.say)


class HarmonyFormat(MarkedReasoning):
    """gpt-oss."""

    finds = ("reasoning", "tool_calls")
    keeps_special_tokens = True

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return (
            None
            if _CHANNEL in template and _MESSAGE in template
            else f"the chat template writes no {_CHANNEL}"
        )

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return HarmonyParser(prompt_end, tools)

    def stop_scope(self, prompt_end: str) -> StopScope:
        return scope_of(HarmonyParser(prompt_end, ()))

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> Structure | None:
        # A call ends the answer.
        def begin(name: str) -> str:
            return f"{_CHANNEL}commentary to={_FUNCTIONS}{name} {_CONSTRAIN}json{_MESSAGE}"

        called = calls(tools, begin, "", parallel=False)
        if required:
            return called
        preamble = tag(f"{_CHANNEL}commentary{_MESSAGE}", ANY_TEXT, f"{_END}{_START}assistant")
        return choice(called, sequence(preamble, called), self.content(ANY_TEXT))

    def content(self, structure: Structure) -> Structure:
        return tag(f"{_CHANNEL}final{_MESSAGE}", structure, "")

    def after_reasoning(
        self, structure: Structure, template_kwargs: Mapping[str, Any]
    ) -> Structure:
        thought = tag(f"{_CHANNEL}analysis{_MESSAGE}", ANY_TEXT, f"{_END}{_START}assistant")
        return choice(sequence(thought, structure), structure)

    @property
    def marks(self) -> Marks:
        # The first time, the model may still call a function. Whoever thinks on has to answer.
        next_message = f"{_END}{_START}assistant"
        return Marks(
            f"{_CHANNEL}analysis{_MESSAGE}",
            _END,
            repeats=True,
            forced=next_message,
            forced_again=f"{next_message}{_CHANNEL}final{_MESSAGE}",
        )
