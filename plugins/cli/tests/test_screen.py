"""Display of answers: wrapped at words, Markdown block by block, and without sequences that steer
the terminal."""

from __future__ import annotations

import io
import re
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from rich.console import Console
from toolkit_lm_cli.screen import (
    Blocks,
    MarkdownScreen,
    PlainScreen,
    Thought,
    WithoutThoughts,
    WrappedScreen,
    Wrapper,
    printable,
)

MARKDOWN = """# Title

A first line
and a second.

- one

- two
  with more

```python
def f():

    return "<b>"
```

| a | b |
|---|---|
| 1 | 2 |

The <think>end</think>.
"""


def pieces_of(text, cuts):
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in pairwise(edges)]


def blocks_of(pieces):
    blocks = Blocks()
    return [block for piece in pieces for block in blocks.push(piece)] + [blocks.rest]


def test_blocks_end_where_no_code_and_no_list_goes_on():
    found = [block.strip() for block in blocks_of([MARKDOWN])]
    assert [block.split("\n")[0] for block in found] == [
        "# Title",
        "A first line",
        "```python",
        "| a | b |",
        "The <think>end</think>.",
    ]
    assert found[1].endswith("with more") and found[2].endswith("```")
    assert [block.strip() for block in blocks_of(["~~~~\na\n\nb\n~~~\n\nc\n~~~~\n\nd\n"])] == [
        "~~~~\na\n\nb\n~~~\n\nc\n~~~~",
        "d",
    ]


@given(st.lists(st.integers(0, 10_000), max_size=30))
def test_blocks_are_the_same_however_the_text_comes(cuts):
    assert blocks_of(pieces_of(MARKDOWN, cuts)) == blocks_of([MARKDOWN])


@given(
    st.text(alphabet="ab \n\t日", max_size=80),
    st.lists(st.integers(0, 100), max_size=10),
    st.integers(4, 20),
)
def test_words_are_wrapped_the_same_however_the_text_comes(text, cuts, width):
    whole = Wrapper(width)
    parts = Wrapper(width)
    wrapped = whole.push(text) + whole.end()
    assert "".join(parts.push(piece) for piece in pieces_of(text, cuts)) + parts.end() == wrapped
    assert wrapped.split() == text.split()


def test_lines_break_between_words():
    wrapper = Wrapper(10)
    assert wrapper.push("one two three four\nfive sixsixsixsixsix seven") + wrapper.end() == (
        "one two\nthree four\nfive\nsixsixsixsixsix\nseven"
    )
    wide = Wrapper(6)
    assert wide.push("日本 日本") + wide.end() == "日本\n日本"


def test_no_text_steers_the_terminal():
    assert printable("a\x1b[2Jb\x07\r\n\tc\x9b1m\x7f") == "a␛[2Jb␇\n\tc�1m␡"


@pytest.fixture
def console():
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=40,
        height=10,
        color_system=None,
        legacy_windows=False,
    )


def test_markdown_is_shown_with_its_line_breaks_its_tags_and_its_addresses(console):
    text = f"{MARKDOWN}\n[here](http://a.example) \x1b[31mred"
    shown = MarkdownScreen(console).show(iter(pieces_of(text, range(0, 400, 7))))
    assert (shown.text, shown.is_whole) == (text, True)
    written = console.file.getvalue()
    for part in (
        "A first line\nand a second.\n",
        "def f():",
        "The <think>end</think>.",
        "here (http://a.example) ␛[31mred",
    ):
        assert part in written, part
    assert "\x1b]8;" not in written and "\x1b[31m" not in written


@pytest.mark.parametrize("kind", [MarkdownScreen, WrappedScreen])
def test_thoughts_are_shown_and_are_no_part_of_the_answer(console, kind):
    shown = kind(console).show(
        iter([Thought("Let me "), "", Thought("see."), "", "It is ", "**two**."])
    )
    assert shown.text == "It is **two**."
    written = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]|[\r*]", "", console.file.getvalue())
    assert "Let me see.\n\nIt is two." in written


def test_thoughts_are_dim_where_a_terminal_has_styles():
    for system, written in (
        ("standard", "\x1b[2mLet me \x1b[22m\x1b[2msee.\n\n\x1b[22mTwo.\n"),
        (None, "Let me see.\n\nTwo.\n"),
    ):
        console = Console(
            file=io.StringIO(),
            force_terminal=True,
            width=40,
            color_system=system,
            legacy_windows=False,
        )
        WrappedScreen(console).show(iter([Thought("Let me "), Thought("see."), "Two."]))
        assert re.sub(r"\x1b\[22m\x1b\[2m", "", console.file.getvalue()) == re.sub(
            r"\x1b\[22m\x1b\[2m", "", written
        )


@pytest.mark.parametrize("kind", [MarkdownScreen, WrappedScreen])
def test_thoughts_may_be_left_out(console, kind):
    closed = []

    def stream():
        try:
            yield from [Thought("Let me see."), "Two."]
        finally:
            closed.append(True)

    assert WithoutThoughts(kind(console)).show(stream()) == ("Two.", True)
    assert (
        "Let me" not in console.file.getvalue()
        and "Two." in console.file.getvalue()
        and closed == [True]
    )


def test_thoughts_are_not_written_to_files(capsys):
    assert PlainScreen().show(iter([Thought("Let me see."), "Two."])).text == "Two."
    assert capsys.readouterr().out == "Two.\n"


def interrupted(closed):
    try:
        yield "some "
        raise KeyboardInterrupt
    finally:
        closed.append(True)


@pytest.mark.parametrize("kind", [MarkdownScreen, WrappedScreen])
def test_an_interrupt_keeps_what_came_before(console, kind):
    closed = []
    shown = kind(console).show(interrupted(closed))
    assert (shown.text, shown.is_whole, closed) == ("some ", False, [True])
    assert "some" in console.file.getvalue()


def test_an_error_of_the_stream_is_raised(console):
    def failing():
        yield "a"
        raise ValueError

    with pytest.raises(ValueError):
        MarkdownScreen(console).show(failing())
