"""The tools of a request: which there are, and whether one must be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from toolkit_lm.errors import RequestError

from toolkit_lm_server.errors import printable

MAX_TOOLS = 512
_MOST_NAME = 128
_WORDS = ("none", "auto", "required")


class ToolUse(NamedTuple):
    """The tools of one request."""

    tools: list[dict[str, Any]]
    """Tools that the model is told of."""
    callable: list[dict[str, Any]]
    """Tools that may be called. One of them must be where `required`."""
    required: bool
    parallel: bool


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
    found = [_tool(index, tool) for index, tool in enumerate(tools or ())]
    if not found:
        if choice in (None, "none", "auto"):
            return NO_TOOLS
        raise RequestError("tool_choice is allowed only with tools.", "tool_choice")
    if choice == "none":
        return NO_TOOLS
    if choice is None or isinstance(choice, str):
        if choice not in (None, *_WORDS):
            raise RequestError(
                f"tool_choice must be one of {', '.join(_WORDS)}, or a function, not "
                f"{printable(choice)!r}.",
                "tool_choice",
            )
        return ToolUse(found, found, required=choice == "required", parallel=parallel is not False)
    function = choice.get("function")
    name = (
        function.get("name")
        if choice.get("type") == "function" and isinstance(function, Mapping)
        else None
    )
    if not isinstance(name, str):
        raise RequestError(
            'tool_choice must be {"type": "function", "function": {"name": ...}}.', "tool_choice"
        )
    named = [tool for tool in found if tool["function"]["name"] == name]
    if not named:
        raise RequestError(
            f"tool_choice names the function {printable(name)!r}, which is not among the tools.",
            "tool_choice",
        )
    return ToolUse(found, named[:1], required=True, parallel=False)


def _tool(index: int, tool: Any) -> dict[str, Any]:
    where = f"tools[{index}]"
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise RequestError(f'{where}: its type must be "function".', "tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(
            f'{where} must have a "function": a mapping with a name, a description and parameters.',
            "tools",
        )
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME or not _is_name(name):
        raise RequestError(
            f"{where}.function.name must be 1 to {_MOST_NAME} letters, digits and characters of "
            "'_-.'.",
            "tools",
        )
    if not isinstance(function.get("description", ""), str | None):
        raise RequestError(f"{where}.function.description must be a text.", "tools")
    parameters = function.get("parameters")
    if parameters is not None and (
        not isinstance(parameters, dict) or parameters.get("type", "object") != "object"
    ):
        raise RequestError(
            f'{where}.function.parameters must be a JSON Schema of type "object".', "tools"
        )
    return {**tool, "type": "function"}


def _is_name(name: str) -> bool:
    return name.isascii() and name.replace("_", "a").replace("-", "a").replace(".", "a").isalnum()
