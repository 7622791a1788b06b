"""The forms of messages and of tools that clients send, and those that a chat template writes in
full.

A form says the same in other words: no content as null, as an empty text or by its absence;
arguments as a mapping or as the text of JSON. Which form a template writes in full is found by
trials, each when it is first needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

Plain = dict[str, Any]
"""A message, or a tool, of JSON types only."""
Content = Literal["given", "text", "parts", "absent", "null"]
Calls = Literal["given", "mapping", "text", "absent", "empty", "null"]
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning, as transformers knows them; the first is what templates
read."""
_CLIENTS = ("system", "developer", "user")
"""Roles whose messages always have a content."""


class Sort(NamedTuple):
    """Properties that decide the form of a message."""

    role: str
    content: Literal["text", "parts", "media", "empty", "none"]
    """`parts`: a list of texts. `empty`: a text or list without anything in it. `none`: null, or no
    key."""
    has_calls: bool


class Form(NamedTuple):
    """How a message is handed to a template."""

    role: str
    content: Content = "given"
    calls: Calls = "given"
    """Form of the arguments of tool calls; for a message without calls, the form of that absence.
    """
    is_flat: bool = False
    """Calls have `name` and `arguments` themselves, without a mapping `function` around them."""
    apart: Content | None = None
    """If not None: a message with both content and calls is split in two. The content comes first;
    the message with the calls gets this content."""


class ToolForm(NamedTuple):
    """How tools are handed to a template."""

    filled: tuple[str, ...] = ()
    """Fields that are filled in for each function where they are missing or null."""
    is_flat: bool = False
    """Tools are their functions, without a mapping `function` around them."""


def sort_of(message: Plain) -> Sort:
    """The sort of a message whose content is a text, a list of parts with types, or nothing."""
    content = message.get("content")
    if content is None:
        found = "none"
    elif not content:
        found = "empty"
    elif isinstance(content, str):
        found = "text"
    else:
        found = "parts" if all(part["type"] == "text" for part in content) else "media"
    return Sort(message["role"], found, bool(message.get("tool_calls")))  # type: ignore[arg-type]


def forms_of(sort: Sort, source: str) -> Iterator[Form]:
    """The forms that a message of a sort may have, the one to be preferred first: the form that
    apply_chat_template of transformers gets.

    `source`: of the template. One that does not name the role developer does not know it: it stands
    for system.
    """
    role = "system" if sort.role == "developer" and "developer" not in source else sort.role
    contents: Sequence[Content] = ("given",)
    match sort.content:
        case "text":
            contents = ("given", "parts")
        case "parts":
            contents = ("given", "text")
        case "none" | "empty" if sort.role not in _CLIENTS:
            contents = (
                ("absent", "null", "text", "parts")
                if sort.content == "none"
                else ("given", "absent", "null", "parts")
            )
        case "empty":
            contents = ("given", "text", "parts")
    calls: Sequence[Calls] = (
        ("absent", "empty", "null") if sort.role == "assistant" else ("absent",)
    )
    flat = [False]
    if sort.has_calls:
        calls = ("mapping", "text")
        flat = [False, True]
    apart: Sequence[Content | None] = (None,)
    if sort.has_calls and sort.content in ("text", "parts"):
        apart = (None, "absent", "null", "text")
    for is_apart, is_flat, call, content in product(apart, flat, calls, contents):
        yield Form(role, content, call, is_flat, is_apart)


def written(message: Plain, form: Form) -> list[Plain]:
    """A message in a form, which may be two messages. Keys keep their order, since a template may
    write them all."""
    if form.apart is None:
        return [_written(message, form)]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    called = {name: value for name, value in message.items() if name not in ("content", *REASONING)}
    return [
        _written(rest, form._replace(calls="absent")),
        _written(called, form._replace(content=form.apart)),
    ]


def _written(message: Plain, form: Form) -> Plain:
    made = {**message, "role": form.role}
    content = message.get("content")
    match form.content:
        case "text":
            made["content"] = (
                "\n".join(part["text"] for part in content)
                if isinstance(content, list)
                else content or ""
            )
        case "parts":
            made["content"] = (
                content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
            )
        case "absent":
            made.pop("content", None)
        case "null":
            made["content"] = None
    if calls := message.get("tool_calls"):
        made["tool_calls"] = (
            [_call(call, form) for call in calls] if isinstance(calls, list) else calls
        )
    elif form.calls in ("given", "absent"):
        made.pop("tool_calls", None)
    else:
        made["tool_calls"] = [] if form.calls == "empty" else None
    return made


def _call(call: Any, form: Form) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if form.calls == "mapping":
        arguments = _mapping(arguments)
    elif form.calls == "text" and not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    made = {**function, "arguments": arguments}
    return (
        {**{name: value for name, value in call.items() if name != "function"}, **made}
        if form.is_flat
        else {**call, "function": made}
    )


def _mapping(arguments: Any) -> Any:
    """Arguments as a mapping. A text that is not a JSON object (from a cut-off answer) stays a
    text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with its reasoning under the names that templates read."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return (
        message
        if reasoning is None
        else {"thinking": reasoning, **message, REASONING[0]: reasoning}
    )


def with_names(messages: Sequence[Plain]) -> list[Plain]:
    """Messages whose results of tools have the name of the function, where the call that they
    answer has one."""
    names: dict[Any, Any] = {}
    made = []
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if (
                isinstance(call, dict)
                and isinstance(call.get("function"), dict)
                and isinstance(call.get("id"), str)
            ):
                names[call["id"]] = call["function"].get("name")
        called = message.get("tool_call_id")
        if (
            message["role"] == "tool"
            and "name" not in message
            and isinstance(called, str)
            and isinstance(names.get(called), str)
        ):
            message = {**message, "name": names[called]}
        made.append(message)
    return made


TOOL_FORMS = [
    ToolForm(filled, is_flat)
    for is_flat in (False, True)
    for filled in (
        (),
        ("parameters",),
        ("parameters", "description"),
        ("parameters", "description", "required"),
    )
]
"""In the order of preference. The first hands tools on as they are."""
_NO_PARAMETERS = {"type": "object", "properties": {}}


def written_tool(tool: Any, form: ToolForm) -> Any:
    """Writes a tool in a form. Entries that are not functions stay as they are."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    filled: Plain = {}
    if "description" in form.filled and function.get("description") is None:
        filled["description"] = ""
    parameters = function.get("parameters")
    if "parameters" in form.filled and (parameters is None or isinstance(parameters, dict)):
        required: Plain = {"required": []} if "required" in form.filled else {}
        filled["parameters"] = {**_NO_PARAMETERS, **required, **(parameters or {})}
    made = {**function, **filled}
    return made if form.is_flat else {**tool, "function": made}


class ToolSort(NamedTuple):
    """Properties that decide the form of a tool: which fields it has, and which of them are
    null."""

    description: str
    parameters: str
    has_required: bool


def tool_sort_of(tool: Any) -> ToolSort | None:
    """The sort of a tool; None if it is not a function."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return None
    parameters = function.get("parameters")
    stated = "given" if parameters else "empty"
    if isinstance(parameters, dict) and not isinstance(parameters.get("properties"), dict):
        stated = "empty" if not parameters else "without properties"
    description = (
        "given" if function.get("description") is not None else _missing(function, "description")
    )
    return ToolSort(
        description,
        stated if parameters is not None else _missing(function, "parameters"),
        isinstance(parameters, dict) and "required" in parameters,
    )


def _missing(function: Plain, name: str) -> str:
    return "null" if name in function else "absent"
