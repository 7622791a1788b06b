"""Each format reads what models write, and gives the same for every cut of it."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st
from recorded import JSON_PARIS, RECORDED, TOOLS, Recorded
from toolkit_lm.plugin import Plugins
from toolkit_lm.renderer import ToolCallDelta

PARSERS = Plugins.load().parsers
FORMATS = PARSERS.keys()


class Answer(NamedTuple):
    """All deltas together."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    calls_tools: bool


def parse(name: str, pieces: list[str], prompt_end: str = "", *, cut: bool = False) -> Answer:
    parser = PARSERS.make(name, "").parser(prompt_end, TOOLS)
    content, reasoning, calls = "", "", []
    for delta in [*(parser.push(piece) for piece in pieces), parser.finish(cut=cut)]:
        content, reasoning = content + delta.content, reasoning + delta.reasoning
        for one in delta.tool_calls:
            if one.name is not None:
                assert one.index == len(calls)
                calls.append([one.name, ""])
            calls[one.index][1] += one.arguments
    return Answer(content, reasoning, tuple((name, arguments) for name, arguments in calls), parser.calls_tools)


def cuts(text: str, rng: random.Random) -> list[list[str]]:
    """Every single cut, each character alone, and some at random."""
    found = [[text[:at], text[at:]] for at in range(len(text) + 1)] + [list(text)]
    for _ in range(20):
        places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 12)))
        found.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return found


def read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_answer_is_read(name):
    one: Recorded = RECORDED[name]
    found = parse(one.format, [one.text], one.prompt_end)
    assert (found.content, found.reasoning) == (one.content, one.reasoning)
    assert [(called, read(arguments)) for called, arguments in found.calls] == list(one.calls)
    assert found.calls_tools == (bool(one.calls) and one.whole)


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
        if found.calls_tools:
            assert all(isinstance(read(arguments), dict) for _, arguments in found.calls)
        # What is whole stays as it is; only the last one may be cut.
        if one.whole:
            for (called, arguments), (expected, value) in zip(found.calls, one.calls, strict=False):
                assert called == expected
                assert read(arguments) == value or (called, arguments) == found.calls[-1]


@pytest.mark.parametrize("name", [name for name in RECORDED if RECORDED[name].calls and RECORDED[name].whole])
def test_what_is_cut_of_a_call_is_never_content(name):
    """Of every beginning of an answer, the content is a beginning of its content; but one character alone may be anything."""
    one: Recorded = RECORDED[name]
    for end in range(len(one.text)):
        for pieces in ([one.text[:end]], list(one.text[:end])):
            content = parse(one.format, pieces, one.prompt_end, cut=True).content.rstrip()
            assert one.content.startswith(content) or (content[-1] in "<[" and one.content.startswith(content[:-1].rstrip())), one.text[
                :end
            ]


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
    assert parse(name, [text], cut=True) == parse(name, list(text), cut=True) == Answer(content, "", (), False)
    # An answer that the model has ended is none that was cut.
    assert parse(name, [text]).content == text


def test_a_cut_call_has_the_arguments_so_far():
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'
    assert parse("hermes", [text], cut=True) == Answer("", "", (("get_weather", '{"city": "Par'),), False)
    closing = f"<tool_call>{JSON_PARIS}\n</tool"
    assert parse("hermes", [closing], cut=True) == Answer("", "", (("get_weather", PARIS),), True)
    assert parse("hermes", [closing]).content == "</tool"
    for second in ("<tool_c", "<tool_call>", '<tool_call>{"na'):
        text = f"<tool_call>{JSON_PARIS}</tool_call>\n{second}"
        assert parse("hermes", [text], cut=True) == parse("hermes", list(text), cut=True) == Answer("", "", (("get_weather", PARIS),), True)
    assert parse("hermes", ['Hm. <tool_call>{"na'], cut=True).content == "Hm. "
    named = '<tool_call>\n{"name": "get_weather", "argum'
    assert parse("hermes", [named], cut=True).calls == (("get_weather", ""),)
    assert parse("pythonic", ['[get_weather(city="Paris", days='], cut=True).calls == (("get_weather", '{"city": "Paris"'),)


def test_arguments_come_before_the_call_is_whole():
    parser = PARSERS.make("hermes", "").parser("", TOOLS)
    [first] = parser.push('<tool_call>{"name": "get_weather", "arguments": {"city": "Pa').tool_calls
    [second] = parser.push("ris").tool_calls
    assert (first, second) == (ToolCallDelta(0, "get_weather", '{"city": "Pa'), ToolCallDelta(0, None, "ris"))


def test_only_what_may_begin_a_mark_is_held_back():
    parser = PARSERS.make("hermes", "").parser("", TOOLS)
    assert [parser.push(text).content for text in ("1 < 2", " <tool", "box", "<tool_call")] == ["1 < 2", "", " <toolbox", ""]
    assert parser.finish(cut=False).content == "<tool_call"


MARKS = {mark for one in RECORDED.values() for mark in one.text.replace(">", "> ").replace("{", " { ").split()}
PARIS = '{"city": "Paris"}'
WORDS = ["get_weather", '"name": ', '"arguments": ', '{"city": "Paris"}', "<tool_call>", "[TOOL_CALLS]", "\\ud800", "é"]
PIECES = [*sorted(MARKS), *WORDS, *"{}[](),:;'\"\\<> \n="]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=25), cut=st.booleans(), start=st.sampled_from(["", "<think>\n", "<|start|>assistant"])
)
def test_nothing_that_a_model_writes_is_an_error_or_read_in_two_ways(name, pieces, cut, start):
    text = "".join(pieces)
    whole = parse(name, [text], start, cut=cut)
    assert parse(name, list(text), start, cut=cut) == whole
    assert parse(name, pieces, start, cut=cut) == whole
    if whole.calls_tools:
        assert all(isinstance(read(arguments), dict) for _, arguments in whole.calls)
    for part in (whole.content, whole.reasoning, *(text for call in whole.calls for text in call)):
        part.encode()


@pytest.mark.parametrize("name", FORMATS)
def test_long_answers_take_no_longer_than_their_length(name):
    """A hundred thousand characters of each mark: seconds, were they read again from each of them."""
    for piece in (
        "<tool_call>",
        '<tool_call>{"name": "',
        "[TOOL_CALLS]",
        "[",
        "{",
        '[get_weather(city="',
        " ",
        "<|channel|>",
        "<function=f><parameter=a>",
    ):
        text = piece * (100_000 // len(piece))
        parse(name, [text])
