"""Malformed calls are read as they were meant, or are content without marks. A bad call does not
lose a good one."""

from __future__ import annotations

import json
import random

import pytest
from families import FIELD, NEW_WRITTEN, WRITTEN
from malformed import (
    AS_JSON,
    JSON_FAULTS,
    UNCLOSED,
    UNREADABLE,
    WITH_END,
    form_of,
    of_each,
)
from recorded import OSLO, PARIS
from test_parsers import PARSERS, cuts, parse

IN_TAGS = {name for name, one in NEW_WRITTEN.items() if not one.city.startswith("{")}
"""New formats whose arguments have a manner of their own."""
AS_JSON = (*AS_JSON, *(name for name in NEW_WRITTEN if name not in IN_TAGS))
FORMATS = [name for name in PARSERS if "tool_calls" in PARSERS.load(name).finds]
EACH = [(name, fault) for name in WRITTEN for fault in of_each(WRITTEN[name])]


def checked(name, text, prompt_end=""):
    """An answer whose calls are JSON objects, and which is the same however it is cut."""
    found = parse(name, [text], prompt_end)
    for pieces in cuts(text, random.Random(0)):
        assert parse(name, pieces, prompt_end) == found, pieces
    return found, [(called, json.loads(arguments)) for called, arguments in found.calls]


def test_each_format_is_in_the_table():
    assert {form_of(name) for name in WRITTEN} == set(FORMATS)
    assert {fault.format for fault in FIELD.values()} >= set(FORMATS)


@pytest.mark.parametrize(("name", "fault"), EACH)
def test_a_fault_loses_no_call_and_shows_no_mark(name, fault):
    written = WRITTEN[name]
    text, num_calls, words = of_each(written)[fault]
    found, calls = checked(form_of(name), text)
    assert calls == [PARIS, OSLO][2 - num_calls :], found
    assert words in found.content
    assert not [mark for mark in written.marks if mark in found.content], found.content
    assert found.calls_tools == bool(calls)


@pytest.mark.parametrize("fault", JSON_FAULTS)
@pytest.mark.parametrize("name", AS_JSON)
def test_arguments_with_known_faults_are_read(name, fault):
    arguments, value = JSON_FAULTS[fault]
    found, calls = checked(form_of(name), WRITTEN[name]._replace(days=arguments).oslo)
    if value is None:
        assert not calls and arguments in found.content
    else:
        assert (calls, found.content) == ([("get_time", value)], "")


def test_each_format_has_arguments_that_not_all_can_read():
    assert {form_of(name) for name in (*AS_JSON, *UNREADABLE)} == set(FORMATS) - IN_TAGS


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_not_every_reader_of_json_takes_is_content(name):
    for arguments in UNREADABLE[name]:
        found, calls = checked(form_of(name), WRITTEN[name]._replace(days=arguments).oslo)
        assert not calls and ("ud800" in found.content or "1e999" in found.content)


@pytest.mark.parametrize("fault", UNCLOSED)
@pytest.mark.parametrize("name", WITH_END)
def test_brackets_that_are_missing_at_the_end_are_read(name, fault):
    arguments, value = UNCLOSED[fault]
    written = WRITTEN[name]._replace(days=arguments)
    for text in (
        written.oslo,
        f"{written.begin}get_time{written.between}{arguments}{written.end.removeprefix('}')}",
    ):
        found, calls = checked(form_of(name), text)
        assert (calls, found.content) == ([("get_time", value)], "")


@pytest.mark.parametrize("name", FIELD)
def test_what_was_seen_in_the_field_is_read(name):
    fault = FIELD[name]
    found, calls = checked(fault.format, fault.text, fault.prompt_end)
    assert (found.content, found.reasoning, calls) == (
        fault.content,
        fault.reasoning,
        list(fault.calls),
    )


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_a_limit_cuts_is_none(name):
    """Nor is it content; and a whole one before it stays."""
    written = WRITTEN[name]
    for before, calls in (("", ()), (f"{written.paris}\n", ("get_weather",))):
        for end in range(len(written.begin) + 1, len(written.oslo)):
            text = f"{before}{written.oslo[:end]}"
            found = parse(form_of(name), [text], cut=True)
            assert parse(form_of(name), list(text), cut=True) == found
            called = [one for one, _ in found.calls]
            if called == [*calls, "get_time"]:
                assert (
                    json.loads(found.calls[-1][1]) == OSLO[1]
                    and end > len(written.oslo) - len(written.end) - 1
                )
            else:
                assert called == [*calls] and not found.calls_tools
            assert not found.content.strip(), text


@pytest.mark.parametrize(
    "name", [name for name in PARSERS if "tool_calls" not in PARSERS.load(name).finds]
)
@pytest.mark.parametrize(
    "call",
    [name for name in WRITTEN if name in ("hermes", "qwen3_coder", "mistral", "deepseek", "gemma")],
)
def test_a_call_in_reasoning_that_is_not_ended_is_left_to_others(name, call):
    """If the reasoning ends after all, the call was reasoning."""
    form = PARSERS.make(name, "")
    written = WRITTEN[call]
    begun = f"{form.start}Hm.\n\n"
    found, _ = checked(name, f"{begun}{written.oslo}")
    assert (found.reasoning, found.content) == ("Hm.", written.oslo)
    found, _ = checked(name, f"{begun}{written.oslo} or so.{form.end}{written.paris}")
    assert (found.reasoning, found.content) == (f"Hm.\n\n{written.oslo} or so.", written.paris)
    for pieces in ([f"{begun}{written.oslo}"], list(f"{begun}{written.oslo}")):
        assert parse(name, pieces, cut=True).content == ""


@pytest.mark.parametrize("name", WRITTEN)
def test_which_marks_are_content(name):
    """Formats in tags follow docs/tools.md: end tags are content up to the first tag that begins a
    call."""
    written = WRITTEN[name]
    for mark in written.marks:
        found, _ = checked(form_of(name), f"ok {mark} done")
        only_ends = name in ("hermes", "qwen3_coder") and mark not in ("<tool_call>", "<function=")
        assert (mark in found.content) == only_ends, (mark, found)
        found, _ = checked(form_of(name), f"{written.paris}\nok {mark} done")
        assert mark not in found.content
