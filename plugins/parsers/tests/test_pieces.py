"""Calls in pieces: together they are the whole call, and nobody can execute one that is not
whole."""

from __future__ import annotations

import json

import pytest
from families import FIELD, NEW_WRITTEN, RECORDED, WRITTEN
from malformed import form_of
from recorded import TOOLS
from toolkit_lm.plugin import Plugins

PARSERS = Plugins.load().parsers
WHOLE = {"qwen3_coder", "pythonic", "gemma", "functiongemma"} | {
    name for name, one in NEW_WRITTEN.items() if not one.city.startswith("{")
}
"""Their arguments are not JSON: it is made when they are whole."""
ANSWERS = {
    name: (one.format, one.text, one.prompt_end) for name, one in {**RECORDED, **FIELD}.items()
}


def read(form, text, prompt_end="", *, in_pieces, cut=False, size=1):
    """Results of a parser: reasoning, content, calls by their index as lists of pieces, and whether
    it calls tools."""
    parser = PARSERS.make(form, "").parser(prompt_end, TOOLS)
    parser.in_pieces = in_pieces
    deltas = [
        *(parser.push(text[at : at + size]) for at in range(0, len(text), size)),
        parser.finish(cut=cut),
    ]
    calls: dict[int, list[str]] = {}
    names: dict[int, str] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        assert (call.index not in names) == bool(call.name), "the first piece alone has the name"
        names.setdefault(call.index, call.name)
        calls.setdefault(call.index, []).append(call.arguments)
    parts = "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)
    return (
        parts,
        {index: (names[index], pieces) for index, pieces in calls.items()},
        parser.calls_tools,
    )


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize("name", ANSWERS)
def test_the_pieces_of_a_call_are_the_call(name, size):
    form, text, prompt_end = ANSWERS[name]
    parts, whole, calls_tools = read(form, text, prompt_end, in_pieces=False, size=size)
    assert all(len(pieces) == 1 for _, pieces in whole.values())
    same, given, calls_too = read(form, text, prompt_end, in_pieces=True, size=size)
    joined = [(name, "".join(pieces)) for name, pieces in given.values()]
    assert (same, calls_too) == (parts, calls_tools)
    assert [one for one in joined if is_json(one[1])] == [
        (name, "".join(pieces)) for name, pieces in whole.values()
    ]


@pytest.mark.parametrize("name", WRITTEN)
def test_long_arguments_come_as_they_are_written(name):
    written = WRITTEN[name]
    form = form_of(name)
    text = written._replace(city=written.city.replace("Paris", "Paris " * 50)).paris
    _, given, calls_tools = read(form, text, in_pieces=True, size=8)
    [(_, pieces)] = given.values()
    assert calls_tools and (len(pieces) == 1 if name in WHOLE else len(pieces) > 20)
    assert json.loads("".join(pieces))["city"].startswith("Paris Paris")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_cut_call_is_not_whole(name):
    written = WRITTEN[name]
    form = form_of(name)
    for end in range(len(written.oslo)):
        text = written.oslo[:end]
        _, whole, calls_tools = read(form, text, in_pieces=False, cut=True)
        _, given, calls_too = read(form, text, in_pieces=True, cut=True)
        assert calls_too == calls_tools
        for index, (_, pieces) in given.items():
            assert is_json("".join(pieces)) == (index in whole), text


@pytest.mark.parametrize("arguments", [r'{"city": "\ud800"}', '{"days": 1e999}'])
def test_what_turns_out_to_be_no_call_is_never_whole(arguments):
    text = (
        f'<tool_call>{{"name": "get_weather", "arguments": '
        f"{arguments}}}</tool_call>{WRITTEN['hermes'].oslo}"
    )
    parts, whole, _ = read("hermes", text, in_pieces=False)
    same, given, calls_tools = read("hermes", text, in_pieces=True)
    (_, broken), (name, pieces) = given.values()
    assert same == parts and calls_tools and len(whole) == 1 and [*given] == [0, 1]
    assert not is_json("".join(broken)) and (name, "".join(pieces)) == (
        "get_time",
        WRITTEN["hermes"].days,
    )
