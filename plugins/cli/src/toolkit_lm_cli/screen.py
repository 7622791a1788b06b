"""Shows answers while they arrive: plain, wrapped at words, or as Markdown."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.markdown import Markdown
    from rich.segment import Segment

_REFRESHES = 10
"""Per second, of what is not yet known to be a whole block."""
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t\r"}
_CONTROLS |= {0x0D: "", 0x7F: "␡"} | dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}")
_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_GOES_ON = re.compile(r"[ \t]|[-*+] |\d{1,9}[.)] ")
"""A line that may belong to the list before it, across a blank line."""


class Thought(str):
    """A piece of what a model thinks before it answers: shown on a terminal, and no part of the
    answer."""

    __slots__ = ()


class Shown(NamedTuple):
    """The shown part of an answer."""

    text: str
    is_whole: bool


class Screen(Protocol):
    def show(self, stream: Iterable[str]) -> Shown:
        """Shows an answer as it comes. An interrupt ends it: what came before is kept."""

    def note(self, text: str) -> None:
        """Shows a remark about the conversation, outside of it."""


def printable(text: str) -> str:
    """Text that cannot steer a terminal: a model, or who speaks through it, may write escape
    sequences."""
    return text.translate(_CONTROLS)


class PlainScreen:
    """Pieces as they are, for files and pipes; on a terminal without what could steer it."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()

    def show(self, stream: Iterable[str]) -> Shown:
        shown = _Collected(stream)
        for piece in shown:
            if not isinstance(piece, Thought):
                print(printable(piece) if self._is_terminal else piece, end="", flush=True)
        print()
        return shown.result()

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)


class WrappedScreen:
    """Text of a terminal, wrapped at words."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, stream: Iterable[str]) -> Shown:
        wrapper = Wrapper(self._console.width)
        is_thought = False
        with _until_interrupt(stream) as shown:
            for piece in shown:
                if is_thought and not isinstance(piece, Thought):
                    self._write(wrapper.push("\n\n"), dim=True)
                is_thought = isinstance(piece, Thought)
                self._write(wrapper.push(printable(piece)), dim=is_thought)
        self._write(wrapper.end(), dim=is_thought)
        self._write("\n")
        return shown.result()

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False)

    def _write(self, text: str, *, dim: bool = False) -> None:
        # Dumb terminals know no styles.
        self._console.file.write(
            f"\x1b[2m{text}\x1b[22m" if dim and text and self._console.color_system else text
        )
        self._console.file.flush()


class WithoutThoughts:
    """A screen that shows answers without what is thought before them."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self.note = screen.note

    def show(self, stream: Iterable[str]) -> Shown:
        return self._screen.show(_answer(stream))


def _answer(stream: Iterable[str]) -> Iterator[str]:
    try:
        for piece in stream:
            yield "" if isinstance(piece, Thought) else piece
    finally:
        if isinstance(stream, Generator):
            stream.close()


class Wrapper:
    """Breaks lines between words, with text that comes in pieces."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._space = self._word = ""

    def push(self, text: str) -> str:
        """Text that can be printed with this piece. An unfinished word is held back."""
        out = []
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            if part == "\n":
                out.append(self._flush() + "\n")
                self._column = 0
                self._space = ""
            elif part.isspace():
                out.append(self._flush())
                self._space += part
            else:
                self._word += part
        return "".join(out)

    def end(self) -> str:
        return self._flush()

    def _flush(self) -> str:
        from rich.cells import cell_len

        if not self._word:
            return ""
        space = self._space.expandtabs(4)
        word = self._word
        width = cell_len(space) + cell_len(word)
        breaks = self._column > 0 and self._column + width > self._width
        text = f"\n{word}" if breaks else space + word
        self._column = (0 if breaks else self._column) + (cell_len(word) if breaks else width)
        self._column %= self._width
        self._space = self._word = ""
        return text


class MarkdownScreen(WrappedScreen):
    """Markdown on a terminal. A block is printed for good when it is whole; until then its end is
    drawn anew as it grows."""

    def show(self, stream: Iterable[str]) -> Shown:
        from rich.live import Live

        blocks = Blocks()
        thought = ""

        def draw() -> RenderableType:
            return _dim(thought) if thought else markdown(blocks.rest)

        drawn = _Lines(draw, most=max(self._console.height - 2, 1))
        live = Live(drawn, console=self._console, transient=True, refresh_per_second=_REFRESHES)
        with _until_interrupt(stream) as shown, live:
            for piece in shown:
                if isinstance(piece, Thought):
                    thought += printable(piece)
                    continue
                whole, thought = thought, ""
                self._print(whole, _dim)
                for block in blocks.push(printable(piece)):
                    self._print(block)
        self._print(thought, _dim)
        self._print(blocks.rest)
        return shown.result()

    def _print(self, block: str, draw: Callable[[str], RenderableType] | None = None) -> None:
        if block.strip():
            self._console.print(_Lines(lambda: (draw or markdown)(block)))
            self._console.print()


class Blocks:
    """Cuts Markdown that comes in pieces between its blocks: where a blank line is in no code and
    no list."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._line = ""
        self._fence = ""
        self._is_open = False
        """The last whole line is blank, so that the next may begin a block."""

    @property
    def rest(self) -> str:
        """Text after the last whole block."""
        return "".join([*self._lines, self._line])

    def push(self, text: str) -> Iterator[str]:
        """The blocks that are whole with this piece."""
        *whole, self._line = (self._line + text).split("\n")
        for line in whole:
            if self._is_open and line.strip() and not _GOES_ON.match(line):
                yield "".join(self._lines)
                self._lines = []
            self._lines.append(f"{line}\n")
            self._is_open = self._is_closed(line) and not line.strip()

    def _is_closed(self, line: str) -> bool:
        """No code block is open after this line."""
        found = _FENCE.match(line)
        if self._fence:
            if (
                found
                and found[1].startswith(self._fence)
                and not line.strip().strip(self._fence[0])
            ):
                self._fence = ""
        elif found:
            self._fence = found[1]
        return not self._fence


class _Lines:
    """Rendered lines without trailing spaces; all of them, or at most the last `most`."""

    def __init__(self, draw: Callable[[], RenderableType], most: int | None = None) -> None:
        self._draw = draw
        self._most = most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        lines = console.render_lines(self._draw(), options.update(height=None), pad=False)
        for line in lines[-self._most :] if self._most else lines:
            yield from _stripped(line)
            yield Segment.line()


def _stripped(line: list[Segment]) -> list[Segment]:
    """A line without the spaces at its end. Those of another background stay: they are part of a
    block of code."""
    line = list(line)
    while line and not line[-1].text.strip() and not (line[-1].style and line[-1].style.bgcolor):
        line.pop()
    if line and not (line[-1].style and line[-1].style.bgcolor):
        line[-1] = line[-1]._replace(text=line[-1].text.rstrip())
    return line


class _Collected:
    """A stream's pieces, and what they came to."""

    def __init__(self, stream: Iterable[str]) -> None:
        self._stream = stream
        self._pieces: list[str] = []
        self._is_whole = False

    def __iter__(self) -> Iterator[str]:
        for piece in self._stream:
            if not isinstance(piece, Thought):
                self._pieces.append(piece)
            if piece:
                yield piece
        self._is_whole = True

    def result(self) -> Shown:
        return Shown("".join(self._pieces), self._is_whole)


@contextmanager
def _until_interrupt(stream: Iterable[str]) -> Iterator[_Collected]:
    """The stream, which ends with an interrupt too."""
    try:
        with suppress(KeyboardInterrupt):
            yield _Collected(stream)
    finally:
        if isinstance(stream, Generator):
            stream.close()


def _dim(thought: str) -> RenderableType:
    from rich.text import Text

    return Text(thought.strip(), style="dim")


def markdown(text: str) -> Markdown:
    """Markdown that keeps line breaks, shows tags, and shows the addresses of links after their
    texts."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    parsed = (
        MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).parse(text)
    )
    for token in parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    made = Markdown("", hyperlinks=False)
    made.parsed = parsed
    return made


def make_screen(*, as_markdown: bool, thoughts: bool = True) -> Screen:
    """The screen for where standard output goes. `thoughts`: they are shown, on a terminal."""
    screen = _screen(as_markdown)
    return screen if thoughts else WithoutThoughts(screen)


def _screen(as_markdown: bool) -> Screen:
    if not sys.stdout.isatty():
        return PlainScreen()
    from rich.console import Console

    console: Any = Console(highlight=False, markup=False, emoji=False)
    return (
        MarkdownScreen(console)
        if as_markdown and not console.is_dumb_terminal
        else WrappedScreen(console)
    )
