"""Each format reads what models write, and gives the same for every cut of it."""

from __future__ import annotations

import itertools
import json
import random
from typing import NamedTuple

import msgspec
import pytest
from families import NEW_THINKING, NEW_WRITTEN, RECORDED
from hypothesis import given, settings, strategies as st
from recorded import BAR, JSON_PARIS, LOW, TOOLS, Recorded
from toolkit_lm.plugin import Plugins
from toolkit_lm.renderer import ToolCallDelta

PARSERS = Plugins.load().parsers
KINDS = ("answer_think", "apertus", "functionary", "glm", "kimi_k2", "kimi_k3", "lfm2", "step3")
"""One of each kind of the formats that a layout states."""
FORMATS = [
    pytest.param(name, marks=() if name in KINDS else pytest.mark.nightly)
    if name in NEW_WRITTEN or name in NEW_THINKING
    else name
    for name in PARSERS
]


class Answer(NamedTuple):
    """All deltas together."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    calls_tools: bool


def parse(name: str, pieces: list[str], prompt_end: str = "", *, cut: bool = False) -> Answer:
    parser = PARSERS.make(name, "").parser(prompt_end, TOOLS)
    content = ""
    reasoning = ""
    calls = []
    for delta in [*(parser.push(piece) for piece in pieces), parser.finish(cut=cut)]:
        content, reasoning = content + delta.content, reasoning + delta.reasoning
        for one in delta.tool_calls:
            assert one.index == len(calls)
            calls.append((one.name, one.arguments))
    return Answer(content, reasoning, tuple(calls), parser.calls_tools)


def cuts(text: str, rng: random.Random) -> list[list[str]]:
    """Every single cut, each character alone, and some at random."""
    found = [[text[:at], text[at:]] for at in range(len(text) + 1)] + [list(text)]
    for _ in range(20):
        places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 12)))
        found.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return found


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_answer_is_read(name):
    one: Recorded = RECORDED[name]
    found = parse(one.format, [one.text], one.prompt_end)
    assert (found.content, found.reasoning) == (one.content, one.reasoning)
    assert [(called, json.loads(arguments)) for called, arguments in found.calls] == list(one.calls)
    assert found.calls_tools == bool(one.calls)


@pytest.mark.parametrize("name", RECORDED)
def test_every_cut_of_the_stream_gives_the_same(name):
    one: Recorded = RECORDED[name]
    whole = parse(one.format, [one.text], one.prompt_end)
    for pieces in cuts(one.text, random.Random(0)):
        assert parse(one.format, pieces, one.prompt_end) == whole, pieces


@pytest.mark.parametrize("name", RECORDED)
def test_what_max_tokens_cuts_is_the_same_streamed_and_never_called_whole(name):
    one: Recorded = RECORDED[name]
    for end in range(len(one.text)):
        text = one.text[:end]
        found = parse(one.format, [text], one.prompt_end, cut=True)
        assert parse(one.format, list(text), one.prompt_end, cut=True) == found
        for (called, arguments), expected in zip(found.calls, one.calls, strict=False):
            assert (called, json.loads(arguments)) == expected


@pytest.mark.parametrize("name", [name for name in RECORDED if RECORDED[name].calls])
def test_what_is_cut_of_a_call_is_never_content(name):
    """Every beginning of an answer has a beginning of the answer's content; but one character alone
    may be anything."""
    one: Recorded = RECORDED[name]
    for end in range(len(one.text)):
        for pieces in ([one.text[:end]], list(one.text[:end])):
            content = parse(one.format, pieces, one.prompt_end, cut=True).content.rstrip()
            assert one.content.startswith(content) or (
                content[-1] in "<[>f]" and one.content.startswith(content[:-1].rstrip())
            ), one.text[:end]


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("llama3_json", '{"name":', ""),
        ("llama3_json", ' <|python_tag|> {\n "name" : "get_w', ""),
        ("llama3_json", '{"type": "function", "na', ""),
        ("llama3_json", "<|pyth", ""),
        ("llama3_json", '{"name": "Bo', '{"name": "Bo'),
        ("llama3_json", '{"name": "Bob"', '{"name": "Bob"'),
        ("llama3_json", '{"answer": 4', '{"answer": 4'),
        ("llama3_json", '{"name" x', '{"name" x'),
        ("pythonic", "[get_wea", ""),
        ("pythonic", "<|python_start|>[", ""),
        ("pythonic", "[get_wood", "[get_wood"),
        ("pythonic", "[1, 2", "[1, 2"),
        ("hermes", "Hm. <tool_c", "Hm. "),
        ("hermes", "Hm. <", "Hm. <"),
        ("mistral", "Hm. [TOOL", "Hm. "),
    ],
)
def test_the_beginning_of_a_first_call_is_told_from_content(name, text, content):
    assert (
        parse(name, [text], cut=True)
        == parse(name, list(text), cut=True)
        == Answer(content, "", (), False)
    )
    # An answer that the model has ended is none that was cut.
    assert parse(name, [text]).content == text.replace("<|python_start|>", "").replace(
        "<|python_tag|>", ""
    )


def test_a_cut_call_is_left_out():
    for text in (
        '{"name": "get_weather", "arguments": {"city": "Par',
        '{"name": "get_weather", "argum',
        '{"na',
        "",
    ):
        assert parse("hermes", [f"Hm. <tool_call>\n{text}"], cut=True) == Answer(
            "Hm.", "", (), False
        )
        second = [f"<tool_call>{JSON_PARIS}</tool_call>\n<tool_call>{text}"]
        assert parse("hermes", second, cut=True) == Answer("", "", (("get_weather", PARIS),), False)
    closing = f"<tool_call>{JSON_PARIS}\n</tool"
    assert parse("hermes", [closing], cut=True) == Answer("", "", (("get_weather", PARIS),), True)
    assert parse("hermes", [closing]).content == "</tool"
    begun = f"<tool_call>{JSON_PARIS}</tool_call>\n<tool_c"
    assert (
        parse("hermes", [begun], cut=True)
        == parse("hermes", list(begun), cut=True)
        == Answer("", "", (("get_weather", PARIS),), True)
    )
    assert parse("pythonic", ['[get_weather(city="Paris", days='], cut=True) == Answer(
        "", "", (), False
    )


def test_a_call_comes_when_it_is_whole():
    parser = PARSERS.make("hermes", "").parser("", TOOLS)
    assert not any(parser.push('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}'))
    assert parser.push("}").tool_calls == (ToolCallDelta(0, "get_weather", PARIS),)


def test_only_what_may_begin_a_mark_is_held_back():
    parser = PARSERS.make("hermes", "").parser("", TOOLS)
    assert [parser.push(text).content for text in ("1 < 2", " <tool", "box", "<tool_call")] == [
        "1 < 2",
        "",
        " <toolbox",
        "",
    ]
    assert parser.finish(cut=False).content == "<tool_call"


MARKS = {
    mark
    for one in RECORDED.values()
    for mark in one.text.replace(">", "> ").replace("{", " { ").split()
}
PARIS = '{"city": "Paris"}'
WORDS = [
    "get_weather",
    '"name": ',
    '"arguments": ',
    '{"city": "Paris"}',
    "<tool_call>",
    "[TOOL_CALLS]",
    "\\ud800",
    "é",
]
PIECES = [*sorted(MARKS), *WORDS, *"{}[](),:;'\"\\<> \n="]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=25),
    cut=st.booleans(),
    start=st.sampled_from(["", "<think>\n", "<|start|>assistant"]),
)
def test_nothing_that_a_model_writes_is_an_error_or_read_in_two_ways(name, pieces, cut, start):
    text = "".join(pieces)
    whole = parse(name, [text], start, cut=cut)
    assert parse(name, list(text), start, cut=cut) == whole
    assert parse(name, pieces, start, cut=cut) == whole
    assert all(isinstance(msgspec.json.decode(arguments), dict) for _, arguments in whole.calls)
    for part in (whole.content, whole.reasoning, *(text for call in whole.calls for text in call)):
        part.encode()


class Counted(str):
    """A text that counts the characters that are looked at or copied, of itself and of what is made
    of it."""

    __slots__ = ()
    num_characters = 0

    def _count(self, count):
        Counted.num_characters += count + 1
        return self

    def __getitem__(self, place):
        found = str.__getitem__(self, place)
        return Counted(found)._count(len(found))

    def __iter__(self):
        return map(self.__getitem__, range(len(self)))

    def __add__(self, other):
        return Counted(str.__add__(self, other))._count(len(self) + len(other))

    def __radd__(self, other):
        return Counted(str.__add__(other, self))._count(len(self) + len(other))

    def find(self, mark, start=0, *end):
        found = str.find(self, mark, start, *end)
        self._count((len(self) if found < 0 else found) - start)
        return found

    def startswith(self, mark, *start):
        self._count(len(mark))
        return str.startswith(self, mark, *start)

    def strip(self, *characters):
        return self._count(len(self)) and Counted(str.strip(self, *characters))

    def lstrip(self, *characters):
        return self._count(len(self)) and Counted(str.lstrip(self, *characters))

    def rstrip(self, *characters):
        return self._count(len(self)) and Counted(str.rstrip(self, *characters))

    def replace(self, *given):
        return self._count(len(self)) and Counted(str.replace(self, *given))


def work(name: str, text: str, size: int) -> int:
    """The characters that a parser looks at and copies, of a text that comes in pieces of a
    size."""
    Counted.num_characters = 0
    parser = PARSERS.make(name, "").parser("", TOOLS)
    for at in range(0, len(text), size):
        parser.push(Counted(text[at : at + size]))
    parser.finish(cut=False)
    return Counted.num_characters


BEGINNINGS = (
    "<tool_call>",
    '<tool_call>{"name": "',
    '<tool_call>{"name":"f","arguments":{"a":"',
    '<tool_call>{"name":"f","arguments":{',
    "<tool_call>{'",
    "[TOOL_CALLS]",
    "[TOOL_CALLS]f[ARGS]{",
    "[",
    "{",
    "([",
    '{"name":"get_weather","parameters":{',
    '[get_weather(city="',
    "[get_weather(where={'a':",
    "[get_weather(city='",
    " ",
    "\n",
    "<|channel|>",
    "<|channel|>analysis<|message|>",
    "<|start|>assistant to=functions.f<|message|>{",
    "<function=f><parameter=a>",
    "<function=f><parameter=a></parameter>",
    "<function=f>",
    "<parameter=a>",
    f"<{BAR}tool{LOW}call{LOW}begin{BAR}>f<{BAR}tool{LOW}sep{BAR}>{{",
    "<|tool_call>call:f{a:",
    '<|tool_call>call:f{a:<|"|>',
    "</think>",
    "<think>",
    "x",
)


@pytest.mark.parametrize("name", FORMATS)
def test_long_answers_take_no_longer_than_their_length(name):
    """Each mark and beginning is repeated, whole and in pieces: twice the text is twice the work,
    and that is bounded."""
    for piece in BEGINNINGS:
        for size in (10**6, 3):
            short, long = (
                work(name, piece * (length // len(piece)), size) for length in (2_000, 4_000)
            )
            assert long <= 2.3 * short + 2_000, (piece, size, short, long)
            assert long <= 150 * 4_000, (piece, size, long)


@pytest.mark.parametrize(
    "piece",
    [
        "<parameter=city>x",
        "</function>",
        "x </function>\n<parameter=days>1",
        "<parameter=city>x<tool_call>",
    ],
)
def test_a_value_without_an_end_is_looked_through_once(piece):
    for size, end in itertools.product((10**6, 3), ("", "</tool_call>", "</function></tool_call>")):
        short, long = (
            work(
                "qwen3_coder",
                "<tool_call><function=get_weather><parameter=city>"
                f"{piece * (length // len(piece))}{end}",
                size,
            )
            for length in (2_000, 4_000)
        )
        assert long <= 2.3 * short + 2_000, (piece, size, end, short, long)
