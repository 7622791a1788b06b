"""The tools of a request's MCP servers: which there are, and which need approval."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from toolkit_lm.errors import RequestError
from toolkit_lm_media.refusal import RefusedError
from toolkit_lm_server.errors import ApiError, printable

from toolkit_lm_mcp import Options
from toolkit_lm_mcp.connection import Connection, ServerError, check_headers, check_url
from toolkit_lm_mcp.protocol import Session

_FIELDS = {
    *("type", "server_label", "server_url", "server_description", "allowed_tools"),
    *("require_approval", "headers", "authorization", "allowed_callers", "defer_loading"),
}
_LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ODD = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST_NAME = 64
"""Characters of a function's name that any model is told."""


class Tool:
    """A tool that the model may call, by the name of a function."""

    def __init__(self, server: Server, name: str, alias: str, *, needs_approval: bool) -> None:
        """`alias`: the function's name, which differs from the tool's `name` where that is not
        free."""
        self.server = server
        self.name = name
        self.alias = alias
        self.needs_approval = needs_approval


class Server:
    """An MCP server of a request, and the session with it."""

    def __init__(self, tool: Mapping[str, Any], where: str, options: Options) -> None:
        """Checks a tool of type "mcp". Raises RequestError, which names the field."""
        for name in tool:
            if name not in _FIELDS and tool[name] is not None:
                raise RequestError(f"{where}.{name[:64]} is not supported.", "tools")
        self.label = tool.get("server_label")
        if not isinstance(self.label, str) or not _LABEL.fullmatch(self.label):
            raise RequestError(
                f"{where}.server_label must be 1 to 64 letters, digits and characters of '_-.'.",
                "tools",
            )
        if not isinstance(url := tool.get("server_url"), str):
            raise RequestError(f"{where} must have a server_url.", "tools")
        headers = tool.get("headers") or {}
        token = tool.get("authorization")
        if not isinstance(headers, dict) or not isinstance(token, str | None):
            raise RequestError(
                f"{where}: headers must map names to texts, and authorization be a text.", "tools"
            )
        if token is not None:
            headers = {**headers, "Authorization": f"Bearer {token}"}
        try:
            connection = Connection(check_url(url, options), check_headers(headers), options)
        except RefusedError as error:
            raise RequestError(f"{where}: {error}.", "tools") from None
        self._filter = _Filter(tool, where)
        self._connection = connection
        self._is_open = True
        self._session = Session(connection, options.timeout)
        self.listed: list[dict[str, Any]] = []
        """The tools that the model may call, as the server describes them."""

    async def open(self, most: int) -> None:
        """Begins the session, and lists tools. Raises ApiError (424). `most`: of its tools."""
        try:
            await self._connection.open()
            await self._session.open()
            self.listed = [tool for tool in await self._session.tools(most) if self._takes(tool)]
        except (RefusedError, ServerError) as error:
            raise ApiError(
                424,
                f"Error retrieving the list of tools from the MCP server {self.label!r}: {error}.",
                param="tools",
                code="external_connector_error",
            ) from None

    async def aclose(self) -> None:
        """Ends the session."""
        if self._is_open:
            self._is_open = False
            await self._session.aclose()
            await self._connection.aclose()

    def _takes(self, tool: Mapping[str, Any]) -> bool:
        return self._filter.allows(tool)

    def needs_approval(self, tool: Mapping[str, Any]) -> bool:
        """Whether the client approves each call of a tool."""
        return self._filter.needs_approval(tool)

    def list_item(self) -> dict[str, Any]:
        """The item that tells of the tools."""
        tools = [
            {
                "name": tool["name"],
                "description": tool.get("description"),
                "input_schema": tool["inputSchema"],
                "annotations": tool.get("annotations"),
            }
            for tool in self.listed
        ]
        return {
            "type": "mcp_list_tools",
            "id": f"mcpl_{uuid.uuid4().hex}",
            "server_label": self.label,
            "tools": tools,
            "error": None,
        }

    async def call(self, name: str, arguments: str) -> dict[str, Any]:
        """The fields `status`, `output` and `error` of a call's item. `arguments`: in JSON."""
        try:
            read = msgspec.json.decode(arguments or "{}")
            if not isinstance(read, dict):
                raise ServerError("the arguments are no JSON object", -32602)
            result = await self._session.call(name, read)
        except msgspec.DecodeError:
            return _failed(ServerError("the arguments are no JSON object", -32602))
        except ServerError as error:
            return _failed(error)
        blocks = result.get("content")
        blocks = [block for block in blocks if isinstance(block, dict)] if blocks else []
        if result.get("isError") is True:
            failure = {"type": "mcp_tool_execution_error", "content": [*map(_shown, blocks)]}
            return {"status": "failed", "output": None, "error": failure}
        return {"status": "completed", "output": _text(blocks, result), "error": None}


def _failed(error: ServerError) -> dict[str, Any]:
    failure = {"type": error.kind, "code": error.code, "message": str(error)}
    return {"status": "failed", "output": None, "error": failure}


def _text(blocks: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> str:
    """A result as a text. What is none is told of by its type."""
    if not blocks and "structuredContent" in result:
        return msgspec.json.encode(result["structuredContent"]).decode()
    return "\n".join(
        block["text"]
        if block.get("type") == "text" and isinstance(block.get("text"), str)
        else msgspec.json.encode(_shown(block)).decode()
        for block in blocks
    )


def _shown(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block of a result, without the data of an image or a recording."""
    return {name: value for name, value in block.items() if name not in ("data", "blob")}


class _Filter:
    """Which tools of a server a request allows, and which need approval."""

    def __init__(self, tool: Mapping[str, Any], where: str) -> None:
        """Raises RequestError."""
        self._allowed = _condition(tool.get("allowed_tools"), f"{where}.allowed_tools")
        approval = tool.get("require_approval")
        self._default = approval != "never"
        self._always: _Condition | None = None
        self._never: _Condition | None = None
        if isinstance(approval, dict) and approval.keys() <= {"always", "never"}:
            field = f"{where}.require_approval"
            self._always = _condition(approval.get("always"), f"{field}.always")
            self._never = _condition(approval.get("never"), f"{field}.never")
        elif approval not in (None, "always", "never"):
            raise RequestError(
                f'{where}.require_approval must be "always", "never", or {{"always": ..., "never": '
                "...}.",
                "tools",
            )

    def allows(self, tool: Mapping[str, Any]) -> bool:
        return self._allowed is None or self._allowed.holds(tool)

    def needs_approval(self, tool: Mapping[str, Any]) -> bool:
        if self._always is not None and self._always.holds(tool):
            return True
        return self._default and not (self._never is not None and self._never.holds(tool))


class _Condition:
    """A set of tools: by name, or those that only read."""

    def __init__(self, names: Collection[str] | None, *, read_only: bool | None) -> None:
        self._names = None if names is None else frozenset(names)
        self._read_only = read_only

    def holds(self, tool: Mapping[str, Any]) -> bool:
        reads = (tool.get("annotations") or {}).get("readOnlyHint") is True
        return (self._names is None or tool["name"] in self._names) and (
            self._read_only is None or self._read_only == reads
        )


def _condition(value: Any, where: str) -> _Condition | None:
    """The condition of a list of names, or of {"tool_names", "read_only"}. Raises RequestError."""
    if value is None:
        return None
    fields = {"tool_names": value} if isinstance(value, list) else value
    if isinstance(fields, dict) and fields.keys() <= {"tool_names", "read_only"}:
        names = fields.get("tool_names")
        read_only = fields.get("read_only")
        if isinstance(read_only, bool | None) and (
            names is None
            or (isinstance(names, list) and all(isinstance(name, str) for name in names))
        ):
            return _Condition(names, read_only=read_only)
    raise RequestError(
        f'{where} must be a list of names, or {{"tool_names": [...], "read_only": ...}}.', "tools"
    )


class Tools:
    """All tools of a request that MCP servers run."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], options: Options) -> None:
        """`tools`: those of the request, of any type. Raises RequestError."""
        self._most = options.max_tools
        self._others = {
            name
            for tool in tools
            if tool.get("type") != "mcp" and isinstance(name := tool.get("name"), str)
        }
        self.servers: dict[str, Server] = {}
        for index, tool in enumerate(tools):
            if tool.get("type") != "mcp":
                continue
            if len(self.servers) == options.max_servers:
                raise RequestError(
                    f"there are more than {options.max_servers} MCP servers (mcp.max_servers).",
                    "tools",
                )
            server = Server(tool, f"tools[{index}]", options)
            if server.label in self.servers:
                raise RequestError(
                    f"tools[{index}]: two servers have the server_label {server.label!r}.", "tools"
                )
            self.servers[str(server.label)] = server
        self.by_alias: dict[str, Tool] = {}
        self.functions: list[dict[str, Any]] = []
        """The tools as functions of a chat."""

    async def open(self) -> None:
        """Begins all sessions, and lists the tools. Raises ApiError."""
        try:
            await asyncio.gather(*(server.open(self._most) for server in self.servers.values()))
            for server in self.servers.values():
                for tool in server.listed:
                    self._add(server, tool)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Ends all sessions."""
        ends = (server.aclose() for server in self.servers.values())
        await asyncio.gather(*ends, return_exceptions=True)

    def _add(self, server: Server, tool: Mapping[str, Any]) -> None:
        if len(self.functions) == self._most:
            raise ApiError(
                424,
                f"The MCP servers have more than {self._most} tools (mcp.max_tools). Name those "
                "that the model needs, in allowed_tools.",
                param="tools",
                code="external_connector_error",
            )
        alias = _ODD.sub("_", tool["name"])[:_LONGEST_NAME]
        if alias in self._others or alias in self.by_alias:
            alias = _ODD.sub("_", f"{server.label}__{tool['name']}")[:_LONGEST_NAME]
        if alias in self._others or alias in self.by_alias:
            raise ApiError(
                424,
                f"The MCP server {server.label!r} has a tool {printable(tool['name'])!r}, and "
                "another tool has that name. Leave one of them out, in allowed_tools.",
                param="tools",
                code="external_connector_error",
            )
        needs = server.needs_approval(tool)
        self.by_alias[alias] = Tool(server, tool["name"], alias, needs_approval=needs)
        function = {"name": alias, "parameters": tool["inputSchema"]}
        if tool.get("description"):
            function["description"] = tool["description"]
        self.functions.append({"type": "function", "function": function})

    def choice(self, choice: Any) -> Any:
        """A request's tool_choice as a chat has it. Raises RequestError."""
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") == "mcp":
            chosen = self._chosen(choice)
            listed = {"mode": "required", "tools": chosen}
            return chosen[0] if len(chosen) == 1 else {"type": "allowed_tools", **listed}
        if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
            tools: list[Any] = []
            for item in choice["tools"]:
                is_mcp = isinstance(item, dict) and item.get("type") == "mcp"
                tools += self._chosen(item) if is_mcp else [item]
            return {**choice, "tools": tools}
        return choice

    def _chosen(self, item: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The functions of a server, or of one of its tools."""
        label = item.get("server_label")
        name = item.get("name")
        found = [
            {"type": "function", "name": alias}
            for alias, tool in self.by_alias.items()
            if tool.server.label == label and name in (None, tool.name)
        ]
        if not found:
            raise RequestError(
                f"tool_choice: the tools have no server {printable(str(label))!r}"
                f"{'' if name is None else f' with a tool {printable(str(name))!r}'}.",
                "tool_choice",
            )
        return found
