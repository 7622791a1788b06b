"""State that a chat template's renderer keeps of requests: it is bounded, and does not change
another request's answer."""

from __future__ import annotations

import itertools
from copy import deepcopy

import pytest
from template_families import FAMILIES
from template_forms import FORMS, USER
from template_reference import SPECIAL
from toolkit_lm.errors import RequestError
from toolkit_lm_renderer_hf.chat_template import ChatTemplate
from toolkit_lm_renderer_hf.trials import Trials

QUICK = ("phi 4", "minimax", "chatml", "bare functions")
"""Families that are not slow together."""
LATER = ("user", "assistant", "system", "user")


def made(source):
    return ChatTemplate({"default": source}, SPECIAL)


def rendered(template, messages, tools=None):
    """The text, or the error."""
    try:
        return template.render(deepcopy(messages), max_length=2**20, tools=deepcopy(tools))
    except RequestError as error:
        return str(error)


def said(roles, **contents):
    return [{"role": role, "content": contents.get(role, "so it is")} for role in roles]


def remembered(template):
    """Containers that the template's renderer keeps, by name, except those made of the checkpoint
    alone."""
    fixed = {
        "_sources",
        "_special_tokens",
        "_templates",
        "_trials",
        "_media_tokens",
        "_media_texts",
    }
    owners = [template, *template._trials.values()]
    assert all(type(one) in (ChatTemplate, Trials) for one in owners)
    return {
        f"{type(one).__name__}.{name}": kept
        for one in owners
        for name, kept in vars(one).items()
        if isinstance(kept, dict | set | list) and name not in fixed
    }


def sorts_of_tools():
    """Tools of all sorts."""
    descriptions = [{}, {"description": None}, {"description": "of rain"}]
    schemas = [
        None,
        {},
        {"type": "object"},
        {"type": "object", "required": []},
        {"properties": {}, "required": []},
    ]
    parameters = [{}, *({"parameters": schema} for schema in schemas)]
    for one, other in itertools.product(descriptions, parameters):
        yield {"type": "function", "function": {"name": "f", **one, **other}}


@pytest.mark.parametrize("family", ["chatml", "gemma 2", "phi 4", "qwen 3"])
def test_what_is_remembered_has_bounds(family):
    template = made(FAMILIES[family])
    for index in range(3):
        rendered(template, said([f"role {index} {number}" for number in range(100)]))
    rendered(template, said(["x" * 100_000]))
    rendered(template, [USER, {"role": "assistant", "content": "a", "x" * 100_000: 1}, USER])
    tools = list(sorts_of_tools())
    for chosen in itertools.islice(itertools.combinations(tools, 3), 300):
        rendered(template, [USER], list(chosen))
    for roles in itertools.islice(
        itertools.product(("system", "user", "assistant", "other"), repeat=6), 1500
    ):
        rendered(template, said(roles))
    kept = remembered(template)
    assert {
        "ChatTemplate._as_they_are",
        "Trials._forms",
        "Trials._tool_forms",
        "Trials._whole",
    } <= set(kept)
    assert {name: len(one) for name, one in kept.items() if len(one) > 1024} == {}
    assert len(kept["Trials._forms"]) <= 50 and len(kept["Trials._tool_forms"]) <= 256
    assert {name: len(repr(one)) for name, one in kept.items() if len(repr(one)) > 2**20} == {}


@pytest.mark.parametrize("family", ["phi 4", "minimax"])
def test_a_blank_content_turns_no_refusal_off(family):
    template = made(FAMILIES[family])
    refused = rendered(template, said(LATER, system="be brief"))
    assert "does not write the content of messages[2] (role 'system')" in refused
    for blank in (" ", "\n\t", ""):
        assert "does not write" not in rendered(template, said(LATER, system=blank))
        assert rendered(template, said(LATER, system="be brief")) == refused


def blanked(value, key=None):
    """A conversation with the shape of this one, and nothing in it that must be written."""
    match value:
        case dict() if key == "arguments":
            return {}
        case dict():
            return {name: blanked(one, name) for name, one in value.items()}
        case list():
            return [blanked(one) for one in value]
        case str() if key in ("content", "text", "reasoning", "reasoning_content"):
            return " "
        case str() if key == "arguments":
            return "{}"
        case str() if key in ("id", "tool_call_id"):
            return "!"
    return value


def unnamed(tools):
    return (
        None
        if tools is None
        else [{**one, "function": {**one["function"], "name": 5}} for one in tools]
    )


def cut(value, key=None):
    """With arguments that were cut."""
    if isinstance(value, dict):
        return {name: cut(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [cut(one) for one in value]
    return '{"a": "b' if key == "arguments" else value


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in FAMILIES],
)
def test_no_request_changes_what_another_gets(family):
    """Neither one of the same shape whose texts are blank, nor any other."""
    shared = made(FAMILIES[family])
    changed = []
    for messages, tools in FORMS.values():
        rendered(shared, blanked(messages), unnamed(tools))
        rendered(shared, blanked(messages), tools)
        rendered(shared, cut(messages), tools)
        rendered(shared, messages, None if tools is None else tools[:1])
    for name, (messages, tools) in FORMS.items():
        if rendered(shared, messages, tools) != rendered(made(FAMILIES[family]), messages, tools):
            changed.append(name)
    assert not changed


WITHOUT_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}{{ m.content }}{{ m.name }}{% endfor %}"
)


def test_texts_that_look_like_marks_turn_no_refusal_off():
    text = " ".join(f"qz{number}qz" for number in range(99))
    for name in ("name", "tool_call_id", "x"):
        chat = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": text, name: text},
        ]
        template = made(WITHOUT_SYSTEM.replace("m.name", f"m.{name}"))
        assert "does not write the content of messages[0]" in rendered(template, chat)


def test_a_conversation_that_is_refused_turns_no_refusal_off():
    template = made(
        "{% if messages[0].name == 'no' %}{{ raise_exception('no') }}{% endif %}" + WITHOUT_SYSTEM
    )
    chat = [
        {"role": "user", "content": "hi", "name": "no"},
        {"role": "system", "content": "be brief"},
    ]
    assert "refuses this conversation: no" in rendered(template, chat)
    assert "does not write the content of messages[1]" in rendered(
        template, [{**chat[0], "name": "yes"}, chat[1]]
    )


@pytest.mark.parametrize("first", [5, "f"])
def test_tools_that_are_not_written_are_refused_after_some_that_need_not_be(first):
    source = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ "
        "tools[0].function.name }}{% endif %}"
    )
    template = made(source)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {}}} for name in (first, "g")
    ]
    assert "does not write" not in rendered(template, [USER], tools[:1])
    assert "does not write the tools" in rendered(
        template, [USER], [tools[0], {"type": "function", "function": {"name": "g"}}]
    )
