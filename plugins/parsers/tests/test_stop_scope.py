"""A stop text ends an answer in its content, and not in its reasoning: in every format that finds
reasoning, however the text comes."""

from __future__ import annotations

import random

import pytest
from families import FIELD, RECORDED
from recorded import TOOLS, Recorded
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import Plugins
from toolkit_lm.processing.sequence_text import SequenceText
from toolkit_lm.processing.stop import StopTexts
from toolkit_lm.renderer import DecodeStream

PARSERS = Plugins.load().parsers
FORMATS = sorted(name for name in PARSERS if "reasoning" in PARSERS.load(name).finds)
BEGUN = Recorded("deepseek_r1", "Hm.\n\nSo.\n</think>\n\nIt is 4.", "It is 4.", "Hm.\n\nSo.")
REASONED = {
    name: one for name, one in {**RECORDED, "begun": BEGUN}.items() if one.reasoning and one.content
}


class Characters(DecodeStream):
    """One character per token."""

    def push(self, token_ids):
        return "".join(map(chr, token_ids))

    def flush(self):
        return ""

    def decode_stream(self, prompt_token_ids=(), *, skip_special_tokens=True):
        return self


def parsed(one, text, tools=()):
    parser = PARSERS.make(one.format, "").parser(one.prompt_end, tools)
    deltas = [parser.push(text), parser.finish(cut=False)]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)


def ended(one, stop, step=1, includes=False):
    """The text of an answer with a stop text, of which `step` tokens come at a time, and what ended
    it."""
    params = SamplingParams(stop=stop, include_stop_str_in_output=includes)
    scope = PARSERS.make(one.format, "").stop_scope(one.prompt_end)
    text = SequenceText(params, Characters(), [], StopTexts([stop]), scope)
    for at in range(0, len(one.text), step):
        text.push([*map(ord, one.text[at : at + step])], may_stop=True)
        if text.stopped_by:
            break
    text.finish(may_stop=True)
    return "".join(text.shown), text.stopped_by


def test_every_format_of_reasoning_is_tried():
    assert sorted({one.format for one in REASONED.values()}) == FORMATS


@pytest.mark.parametrize("name", REASONED)
def test_a_stop_text_ends_the_content_alone(name):
    one = REASONED[name]
    reasoning, content = parsed(one, one.text)
    words = content.replace("\n\n", " ").split()
    for stop in {*"".join(words), *words, words[-1][-2:]}:
        before = content[: content.index(stop)]
        for step in (1, 7, len(one.text)):
            text, stopped_by = ended(one, stop, step)
            told = parsed(one, text)
            assert (told[0], told[1].rstrip(), stopped_by) == (reasoning, before.rstrip(), stop), (
                stop,
                step,
            )
        assert parsed(one, ended(one, stop, includes=True)[0])[1].endswith(stop)


@pytest.mark.parametrize("name", REASONED)
def test_what_stands_in_the_reasoning_alone_ends_nothing(name):
    one = REASONED[name]
    reasoning, content = parsed(one, one.text)
    marks = (
        "think",
        "THINK",
        "<",
        "[",
        "|",
        "channel",
        "analysis",
        "assistant",
        "final",
        "message",
    )
    for stop in {*reasoning.split(), reasoning, *marks, "\n\n", "\n"}:
        if stop not in content:
            assert ended(one, stop) == (one.text, None), stop


@pytest.mark.parametrize("name", REASONED)
def test_white_space_in_the_content_ends_it_as_it_comes(name):
    """A model that writes nothing but new lines is stopped at the first two."""
    one = REASONED[name]
    content = parsed(one, one.text)[1]
    begun = one.text[: one.text.rindex(content[-8:]) + len(content[-8:])]
    scope = PARSERS.make(one.format, "").stop_scope(one.prompt_end)
    scope.push(begun)
    counting = 0
    for _ in range(4):
        counting += sum(length for length, counts in scope.push("\n") if counts)
    assert counting >= 3


def check_scope(one):
    """Nothing of an answer is lost, and what counts is its content, but for white space between its
    paragraphs."""
    scope = PARSERS.make(one.format, "").stop_scope(one.prompt_end)
    parts = scope.push(one.text) + scope.finish()
    counting = ""
    at = 0
    for length, counts in parts:
        counting += one.text[at : at + length] if counts else ""
        at += length
    assert at == len(one.text)
    assert "".join(counting.split()) == "".join(parsed(one, one.text)[1].split())


@pytest.mark.parametrize(
    "name", [name for name, one in {**RECORDED, **FIELD}.items() if one.format in FORMATS]
)
def test_what_counts_is_the_content(name):
    check_scope({**RECORDED, **FIELD}[name])


@pytest.mark.parametrize("name", FORMATS)
def test_what_counts_is_the_content_of_any_text(name):
    # Headers of messages are whole: a part of one is given in other words than its own, and only
    # when the answer ends.
    header = "<|start|>assistant<|channel|>"
    marks = [
        mark
        for one in ("<think>", "[THINK]", "<seed:think>", "<|channel>thought\n")
        for mark in (one, one[:4])
    ]
    ends = [
        "</think>",
        "[/THINK]",
        "</seed:think>",
        "<channel|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
    ]
    messages = [
        f"{header}{one}<|message|>"
        for one in ("analysis", "final", "commentary", "commentary to=functions.f")
    ]
    drawn = random.Random(1)
    for _ in range(300):
        pieces = [*marks, *ends, *messages, "{}", '{"a": 1', " ", "\n\n", "a", "b <", "<", "to="]
        check_scope(Recorded(name, "".join(drawn.choices(pieces, k=drawn.randint(1, 12)))))


@pytest.mark.parametrize("text", ["<", "<thin", "  ", "<b>bold</b>", "\n\nFour."])
def test_an_answer_without_reasoning_is_content(text):
    one = RECORDED[next(name for name, one in RECORDED.items() if one.format == "think")]._replace(
        text=text, prompt_end=""
    )
    for stop in {*text}:
        assert ended(one, stop) == (text[: text.index(stop)], stop)
    assert ended(one, "</think>") == (text, None)


def test_a_call_that_was_begun_in_the_reasoning_is_not_ended():
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    one = RECORDED[next(name for name, one in RECORDED.items() if one.format == "think")]._replace(
        text=f"<think>\nHm.\n{call}"
    )
    assert ended(one, "Paris") == (one.text, None)
    assert "get_weather" in parsed(one, one.text, TOOLS)[1]
