"""Renders conversations with transformers, in the forms in which its templates write all of it.

Independent of the renderer's trials: the conversation itself is rendered in each form that says the
same, and its own words are looked for."""

from __future__ import annotations

import json
import re
from itertools import product

from transformers.utils.chat_template_utils import render_jinja_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
PAINTED = re.compile(r"""["']type["']:\s*["']text["']|'city':|\\"city\\": \\?"Paris\\?\"""")
"""A list or a mapping as Python writes it, or JSON within JSON."""
EMPTY = {"type": "object", "properties": {}}
REASONING = ("reasoning_content", "thinking", "reasoning")


def contents(message):
    """Equivalent contents, the given one first. `...` stands for a missing key."""
    given = message.get("content")
    if given is ...:
        return [...]
    if given is None and message["role"] in ("assistant", "tool"):
        # transformers leaves out the keys whose value is None, before any template sees them.
        return [..., None, "", [{"type": "text", "text": ""}]]
    if given == "" and message["role"] in ("assistant", "tool"):
        return ["", ..., None, [{"type": "text", "text": ""}]]
    if isinstance(given, str):
        return [given, [{"type": "text", "text": given}]]
    if isinstance(given, list):
        return [given, "\n".join(part["text"] for part in given)]
    return [...]


def arguments(call):
    """Arguments as a mapping and as a text, if they are either."""
    given = call["function"].get("arguments")
    try:
        mapping = json.loads(given or "{}") if isinstance(given, str) or given is None else given
    except ValueError:
        return [given]
    text = given if isinstance(given, str) else json.dumps(mapping, ensure_ascii=False)
    return [mapping, text]


def same_messages(message, names_developer):
    """The lists of messages that say the same as one: a content beside calls may be a message of
    its own."""
    yield from ([one] for one in alike(message, names_developer))
    if message.get("tool_calls") and message.get("content"):
        said = {name: value for name, value in message.items() if name != "tool_calls"}
        called = {
            name: value for name, value in message.items() if name not in ("content", *REASONING)
        }
        for content in (..., None, ""):
            for one, other in product(
                alike(said, False), alike({**called, "content": content}, False)
            ):
                yield [one, other]


def alike(message, names_developer):
    """The messages that say the same as one."""
    roles = [message["role"]]
    if roles == ["developer"]:
        roles = ["developer", "system"] if names_developer else ["system"]
    calls = message.get("tool_calls")
    lists = [..., [], None]
    if calls:
        flat = [
            {"id": call["id"], **call["function"], "arguments": call["function"].get("arguments")}
            for call in calls
        ]
        options = [arguments(call) for call in calls]
        nested = [
            {**call, "function": {**call["function"], "arguments": one}}
            for call in calls
            for one in arguments(call)
        ]
        assert len(calls) == 1
        lists = [[one] for one in nested] + [[{**flat[0], "arguments": one}] for one in options[0]]
    elif message["role"] != "assistant":
        lists = [...]
    for role, found, content in product(roles, lists, contents(message)):
        made = {**message, "role": role, "content": content, "tool_calls": found}
        reasoning = next((made[name] for name in REASONING if made.get(name)), None)
        made |= {} if reasoning is None else dict.fromkeys(REASONING[:2], reasoning)
        yield {
            name: value
            for name, value in made.items()
            if value is not ... and (value is not None or name in ("content", "tool_calls"))
        }


def same_tools(tools):
    """Lists of tools that say the same as one: missing fields may be stated, and the functions may
    stand alone."""
    if not tools:
        yield from (None, [])
        return
    for is_flat in (False, True):
        for level in range(4):
            found = []
            for tool in tools:
                function = dict(tool["function"])
                if level > 1 and function.get("description") is None:
                    function["description"] = ""
                if level > 0:
                    required = {"required": []} if level > 2 else {}
                    function["parameters"] = {
                        **EMPTY,
                        **required,
                        **(function.get("parameters") or {}),
                    }
                found.append(function if is_flat else {**tool, "function": function})
            yield found


def words_of(messages, tools):
    """Words that must be in the prompt: each occurs once in the conversation."""
    words = [tool["function"]["name"] for tool in tools or ()]
    for message in messages:
        content = message.get("content") or []
        words += [content] if isinstance(content, str) else [part["text"] for part in content]
        for call in message.get("tool_calls") or ():
            words.append(call["function"]["name"])
            given = call["function"].get("arguments") or {}
            try:
                given = json.loads(given) if isinstance(given, str) else given
                words += [str(one) for pair in given.items() for one in pair]
            except ValueError:
                words.append(given)
    return [word.strip() for word in words if word.strip()]


def render(template, messages, tools=None, **options):
    """Renders with transformers' apply_chat_template, which leaves out None values before they come
    here; None if the template refuses."""
    try:
        texts, _ = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=template,
            **{"add_generation_prompt": True, **SPECIAL, **options},
        )
    except Exception:
        return None
    return texts[0]


def renderings(template, messages, tools=None, **options):
    """Rendering of each form of the conversation, in the order of preference, without refused
    ones."""
    # A client need not repeat a call's name in its result.
    messages = [
        {"name": "weather", **message} if message["role"] == "tool" else message
        for message in messages
    ]
    for same in same_tools(tools):
        for chats in product(
            *(same_messages(message, "developer" in template) for message in messages)
        ):
            chat = [message for one in chats for message in one]
            if (text := render(template, chat, same, **options)) is not None:
                yield text


def whole(template, messages, tools=None, *, first=False, **options):
    """The renderings that have all words, nothing painted, and None no more often than they must.
    `first`: one is enough."""
    words = words_of(messages, tools)
    found = []
    for text in renderings(template, messages, tools, **options):
        if all(
            word in text or json.dumps(word)[1:-1] in text for word in words
        ) and not PAINTED.search(text):
            found.append(text)
            if first and "None" not in text:
                return [text]
    least = min((text.count("None") for text in found), default=0)
    return [text for text in found if text.count("None") == least]
