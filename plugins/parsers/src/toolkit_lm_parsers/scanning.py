"""ScanParser: what all parsers of answers are made of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from toolkit_lm.renderer import (
    AnswerDelta,
    AnswerParser,
    ContentScope,
    StopScope,
    ToolCallDelta,
)

from toolkit_lm_parsers.reading import Reading, TextReader


class ScanParser(TextReader, AnswerParser):
    """A parser written as one generator, `run`, that reads the text as if it were all there.

    What it decides depends on what was read, and it waits where that is not enough: so that all
    cuts of a text give the same.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self.content = Trimmed(starts=False)
        self._reasoning = Trimmed(starts=True)
        self._calls: list[ToolCallDelta] = []
        self._begun: BegunCall | None = None
        """The call that is given in pieces."""
        self._num_given_up = 0
        """Calls that were given in part, and were none."""
        self.call_id = ""
        """The id of the next call, if the model writes one."""
        self._ids = set[str]()
        self.lacks_call = False
        """The end of the text has cut a call, which is left out."""
        self._running: Reading[None] | None = None

    @abstractmethod
    def run(self) -> Reading[None]:
        """Reads the whole answer."""

    def push(self, text: str) -> AnswerDelta:
        if self._held is not None:
            self._held.append(self.text[self._kept : self.at])
            self._kept = 0
        self._base += self.at
        self._set_text(self.text[self.at :] + text, 0)
        return self._go_on()

    def finish(self, *, cut: bool) -> AnswerDelta:
        self._ended = True
        self.cut = cut
        delta = self._go_on()
        content = "" if self.num_calls or self.lacks_call else self.content.drop_rest()
        return delta._replace(content=delta.content + content)

    @property
    def num_held_back(self) -> int:
        return len(self.text) - self.at

    @property
    def calls_tools(self) -> bool:
        return self.num_calls > 0 and not self.lacks_call

    def _go_on(self) -> AnswerDelta:
        if self._running is None:
            self._running = self.run()
        next(self._running, None)
        calls, self._calls = tuple(self._calls), []
        return AnswerDelta(self.content.drain(), self._reasoning.drain(), calls)

    @property
    def is_cut(self) -> bool:
        """All was read but for a mark that is not whole, and the model did not end it."""
        return self.cut and (self.at_end or self.at == self._cut_mark)

    # Results

    def say(self, text: str) -> None:
        """Adds content. White space before a call is dropped, and so is white space if only calls
        follow."""
        self.content.add(text)

    def think(self, text: str) -> None:
        """Reasoning, whose surrounding white space is left out."""
        self._reasoning.add(text)

    def separate(self) -> None:
        """Starts a new paragraph for the next content or reasoning."""
        self.content.separate()
        self._reasoning.separate()

    def end_reasoning(self) -> None:
        """White space between reasoning and content is left out."""
        self.content.starts = not self.content.has_any

    def begin_call(self, name: str) -> Callable[[str], None] | None:
        """The arguments of a call come next. What takes their JSON as it is read; None: they are
        not wanted in pieces."""
        if not self.in_pieces:
            return None
        self._end_begun()
        begun = BegunCall(self.num_calls + self._num_given_up, name, self._next_id())
        self._begun = begun

        def add_piece(piece: str) -> None:
            self._calls += begun.pieces(piece)

        return add_piece

    def _next_id(self) -> str:
        """The id that the model wrote, unless an earlier call has it."""
        number, self.call_id = self.call_id, ""
        if number in self._ids:
            return ""
        self._ids.add(number)
        return number

    def _end_begun(self) -> None:
        """Ends a call that was given in pieces before it was complete."""
        self._num_given_up += self._begun is not None and self._begun.is_given
        self._begun = None

    def call(self, name: str, arguments: str) -> bool:
        """A whole call. What was read of it is not read again. False: it is none, as not every
        reader of JSON takes its arguments."""
        if not is_readable(arguments):
            return False
        self.content.drop_rest()
        self.content.starts = not self.content.has_any
        if self._begun is not None and self._begun.is_of(name, arguments):
            self._calls.append(self._begun.last(arguments))
            self._begun = None
        else:
            self._end_begun()
            index = self.num_calls + self._num_given_up
            self._calls.append(ToolCallDelta(index, name, arguments, self._next_id()))
        self.num_calls += 1
        self._held = None
        return True

    def rest(self) -> Reading[None]:
        """All that is left is content."""
        while not self.at_end:
            self.say(self.text[self.at :])
            self.at = len(self.text)
            yield from self.peek()


def is_readable(text: str) -> bool:
    """False: it has halves of characters, or numbers that are too large, which Python alone
    takes."""
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return False
    return True


class BegunCall:
    """A call that is given in pieces. The last character of its arguments waits until the call is
    complete: without that character they are not valid JSON."""

    def __init__(self, index: int, name: str, number: str) -> None:
        """`number`: the id that the model wrote, or nothing."""
        self._index = index
        self._name = name
        self._id = number
        self._sent: list[str] = []
        self._last = ""
        self.is_given = False
        """Its name, at least."""

    def pieces(self, text: str) -> list[ToolCallDelta]:
        """The deltas that can be given now that `text` was read."""
        read = self._last + text
        new = read[:-1]
        self._last = read[-1:]
        if self.is_given and not new:
            return []
        self._sent.append(new)
        if self.is_given:
            return [ToolCallDelta(self._index, "", new)]
        self.is_given = True
        return [ToolCallDelta(self._index, self._name, new, self._id)]

    def is_of(self, name: str, arguments: str) -> bool:
        """Whether what was given is of this call."""
        return self.is_given and name == self._name and arguments.startswith("".join(self._sent))

    def last(self, arguments: str) -> ToolCallDelta:
        """The rest of it."""
        return ToolCallDelta(self._index, "", arguments[sum(map(len, self._sent)) :])


class Trimmed:
    """A part of an answer without white space at its end, and on demand at its beginning."""

    def __init__(self, *, starts: bool) -> None:
        self.starts = starts
        """White space that comes next is left out."""
        self.ends = True
        """White space at the end is left out."""
        self.has_any = False
        self._rest: list[str] = []
        """White space that may be at the end."""
        self._new: list[str] = []
        self._is_separate = False

    def add(self, text: str) -> None:
        if self.starts:
            text = text.lstrip()
        if not text:
            return
        kept = len(text.rstrip()) if self.ends else len(text)
        if kept:
            if self.starts and self._is_separate:
                self._new.append("\n\n")
            self.starts = False
            self.has_any = True
            self._new += [*self._rest, text[:kept]]
            self._rest.clear()
        if text[kept:]:
            self._rest.append(text[kept:])

    def separate(self) -> None:
        if self.has_any:
            self._rest.clear()
            self.starts = True
            self._is_separate = True

    def drop_rest(self) -> str:
        """Leaves out white space at the end so far, and returns it."""
        rest = "".join(self._rest)
        self._rest.clear()
        return rest

    def drain(self) -> str:
        new, self._new = "".join(self._new), []
        return new


def scope_of(parser: ScanParser) -> StopScope:
    """The scope of stop texts in a new parser's content, in which white space is content as it
    comes, whatever follows."""
    parser.content.ends = False
    return ContentScope(parser)
