"""The tools of a request: which there are, and whether one must be called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from toolkit_lm.errors import RequestError

from toolkit_lm_server.caller import CALLER
from toolkit_lm_server.errors import printable
from toolkit_lm_server.unknown_fields import STRICT, is_plain

MAX_TOOLS = 512
_MOST_NAME = 128
_WORDS = ("none", "auto", "required")
INPUT = "input"
"""The parameter of a custom tool, as the model is told of it."""


class ToolUse(NamedTuple):
    """The tools of one request."""

    tools: list[dict[str, Any]]
    """Tools that the model is told of, as functions."""
    callable: list[dict[str, Any]]
    """Tools that may be called. One of them must be where `required`."""
    required: bool
    parallel: bool
    custom: frozenset[str] = frozenset()
    """Names of the tools whose input is a text, and no JSON."""

    @property
    def is_limited(self) -> bool:
        """Whether the model is told of tools that it may not call."""
        return len(self.callable) < len(self.tools)


NO_TOOLS = ToolUse([], [], required=False, parallel=True)


def tool_use(
    tools: Sequence[dict[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
) -> ToolUse:
    """The tools from the fields tools, tool_choice and parallel_tool_calls. Raises RequestError,
    which names the field and the tool."""
    if tools and len(tools) > MAX_TOOLS:
        raise RequestError(
            f"there are {len(tools)} tools; at most {MAX_TOOLS} are allowed.", "tools"
        )
    custom: set[str] = set()
    found = [
        made
        for index, tool in enumerate(tools or ())
        if (made := _tool(tool, f"tools[{index}]", custom)) is not None
    ]
    if not found:
        if choice in (None, "none", "auto"):
            return NO_TOOLS
        raise RequestError(
            "tool_choice is allowed only with tools: functions and custom tools.", "tool_choice"
        )
    if choice == "none":
        return NO_TOOLS
    if choice is not None and not isinstance(choice, str):
        return _chosen(found, choice, parallel is not False, frozenset(custom))
    if choice not in (None, *_WORDS):
        raise RequestError(
            f"tool_choice must be one of {', '.join(_WORDS)}, or a function, not "
            f"{printable(choice)!r}.",
            "tool_choice",
        )
    return ToolUse(found, found, choice == "required", parallel is not False, frozenset(custom))


def _chosen(
    tools: list[dict[str, Any]],
    choice: Mapping[str, Any],
    parallel: bool,
    custom: frozenset[str],
) -> ToolUse:
    """The tools where a mapping chooses among them: one that must be called, or several that
    may."""
    if choice.get("type") != "allowed_tools":
        name = _name_of(choice)
        if name is None:
            raise RequestError(
                'tool_choice must be {"type": "function", "function": {"name": ...}}, or the same '
                'of type "custom" or "allowed_tools".',
                "tool_choice",
            )
        return ToolUse(tools, _named(tools, [name]), required=True, parallel=False, custom=custom)
    allowed = choice.get("allowed_tools", choice)
    mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise RequestError(
            'tool_choice of type "allowed_tools" must have "allowed_tools": {"mode": "auto" or '
            '"required", "tools": [...]}.',
            "tool_choice",
        )
    names = []
    for item in listed:
        if isinstance(item, Mapping) and (name := _name_of(item)) is not None:
            names.append(name)
        elif not isinstance(item, Mapping) or item.get("type") in ("function", "custom"):
            raise RequestError("tool_choice: each of its tools must have a name.", "tool_choice")
    left = _named(tools, names)
    if not left and mode == "required":
        raise RequestError("tool_choice allows no tool, and one must be called.", "tool_choice")
    return ToolUse(tools, left, mode == "required", parallel, custom) if left else NO_TOOLS


def _name_of(item: Mapping[str, Any]) -> str | None:
    """The name of a function or a custom tool that a choice refers to: within a mapping of its
    type's name, as chat completions write it, or beside the type, as responses do."""
    kind = item.get("type")
    inner = item.get(kind, item) if kind in ("function", "custom") else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else None


def _named(tools: list[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The tools of these names. Raises RequestError for one that is not among them."""
    known = {tool["function"]["name"]: tool for tool in reversed(tools)}
    for name in names:
        if name not in known:
            raise RequestError(
                f"tool_choice names the function {printable(name)!r}, which is not among the "
                "tools.",
                "tool_choice",
            )
    return [known[name] for name in dict.fromkeys(names)]


def _tool(tool: Any, where: str, custom: set[str]) -> dict[str, Any] | None:
    """A tool as a function; None for one that is left out. Names of custom tools are added to
    `custom`."""
    kind = tool.get("type", "function") if isinstance(tool, dict) else None
    if kind == "custom":
        tool = _as_function(tool, where)
        custom.add(tool["function"]["name"])
    elif kind != "function":
        drop_hosted(kind, where)
        return None
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(
            f'{where} must have a "function": a mapping with a name, a description and parameters.',
            "tools",
        )
    _check_name(function, f"{where}.function")
    parameters = function.get("parameters")
    if parameters is not None and (
        not isinstance(parameters, dict) or parameters.get("type", "object") != "object"
    ):
        raise RequestError(
            f'{where}.function.parameters must be a JSON Schema of type "object".', "tools"
        )
    return {**tool, "type": "function"}


def _check_name(function: Mapping[str, Any], where: str) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME or not _is_name(name):
        raise RequestError(
            f"{where}.name must be 1 to {_MOST_NAME} letters, digits and characters of '_-.'.",
            "tools",
        )
    if not isinstance(function.get("description", ""), str | None):
        raise RequestError(f"{where}.description must be a text.", "tools")


def _is_name(name: str) -> bool:
    return name.isascii() and name.replace("_", "a").replace("-", "a").replace(".", "a").isalnum()


# Tools of other types


def drop_hosted(kind: Any, where: str) -> None:
    """Leaves out a tool that a vendor's server runs, and tells so in the answer's header. Raises
    RequestError where the operator has them refused, and for a type that is none."""
    if not isinstance(kind, str) or not is_plain(kind):
        raise RequestError(f'{where}: its type must be "function" or "custom".', "tools")
    caller = CALLER.get()
    if caller.refuses_hosted_tools:
        raise RequestError(
            f"{where}: this server runs no tools of type {kind!r}: functions and custom tools are "
            "what it takes.",
            "tools",
        )
    (caller.unknown or STRICT).drop(
        f"tools.{kind}", "this server runs no such tools, and the model is not told of it."
    )


def _as_function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A custom tool as a function of one text. Raises RequestError."""
    custom = tool.get("custom", tool)
    if not isinstance(custom, Mapping):
        raise RequestError(f'{where} must have a "custom": a mapping with a name.', "tools")
    _check_name(custom, f"{where}.custom")
    text: dict[str, Any] = {"type": "string", **_input_of(custom.get("format"), where)}
    function = {
        "name": custom["name"],
        "parameters": {
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        },
    }
    if custom.get("description") is not None:
        function["description"] = custom["description"]
    if len(text) > 1:
        function["strict"] = True
    return {"type": "function", "function": function}


def _input_of(form: Any, where: str) -> dict[str, Any]:
    """A schema's description of a custom tool's text."""
    if form is None or (isinstance(form, Mapping) and form.get("type") == "text"):
        return {}
    grammar = form.get("grammar", form) if isinstance(form, Mapping) else None
    match grammar:
        case {"syntax": "regex", "definition": str(pattern)} if pattern:
            return {"pattern": f"^(?:{pattern})$"}
        case {"syntax": "lark", "definition": str(lark)} if lark:
            return {"x-grammar": lark}
    raise RequestError(
        f'{where}: format must be {{"type": "text"}}, or {{"type": "grammar", "grammar": '
        '{"syntax": "lark" or "regex", "definition": ...}}.',
        "tools",
    )


def input_of(arguments: str) -> str:
    """The text that a custom tool is called with."""
    read = json.loads(arguments)
    text = read.get(INPUT) if isinstance(read, dict) and len(read) == 1 else None
    return text if isinstance(text, str) else arguments


def with_functions(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with calls of custom tools as those of functions."""
    return [
        {**message, "tool_calls": [_call_of_function(call) for call in calls]}
        if isinstance(message, Mapping)
        and isinstance(calls := message.get("tool_calls"), list)
        and any(isinstance(call, Mapping) and call.get("type") == "custom" for call in calls)
        else message
        for message in messages
    ]


def _call_of_function(call: Any) -> Any:
    custom = call.get("custom") if isinstance(call, Mapping) else None
    if not isinstance(custom, Mapping):
        return call
    arguments = json.dumps({INPUT: custom.get("input", "")}, ensure_ascii=False)
    function = {"name": custom.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}
