"""Sessions with MCP servers: what is asked, and which servers and answers are refused."""

from __future__ import annotations

import socket

import pytest
from mcp_stub import TOOLS, serving
from ports import free_port
from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm_mcp import Options
from toolkit_lm_mcp.connection import check_headers, check_url
from toolkit_lm_mcp.tools import Tools
from toolkit_lm_media.refusal import RefusedError
from toolkit_lm_server.errors import ApiError

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def stub():
    with serving() as found:
        yield found


def options(stub, **more) -> Options:
    host = stub.url.removeprefix("http://").removesuffix("/mcp")
    return Options(private_hosts=[host], timeout=2.0, **more)


def tool(stub, **more) -> dict:
    return {"type": "mcp", "server_label": "wall", "server_url": stub.url, **more}


@pytest.mark.parametrize("in_events", [False, True])
async def test_a_session(stub, in_events):
    stub.in_events = in_events
    tools = Tools([tool(stub, headers={"X-A": "b"}, authorization="token")], options(stub))
    await tools.open()
    server = tools.servers["wall"]
    assert [one["name"] for one in server.list_item()["tools"]] == ["paint", "look.up", "fail"]
    assert [one["function"]["name"] for one in tools.functions] == ["paint", "look_up", "fail"]
    assert tools.functions[0]["function"] == {
        "name": "paint",
        "description": "Paints a wall.",
        "parameters": TOOLS[0]["inputSchema"],
    }
    assert await server.call("paint", '{"colour": "red"}') == {
        "status": "completed",
        "output": "It is red.",
        "error": None,
    }
    assert (await server.call("look.up", ""))["output"] == '{"type":"image","mimeType":"x/y"}'
    failed = await server.call("fail", "{}")
    assert failed["error"]["type"] == "mcp_tool_execution_error"
    unknown = await server.call("none", "{}")
    assert unknown["error"] == {
        "type": "mcp_protocol_error",
        "code": -32602,
        "message": "no such tool",
    }
    for arguments in ("[1]", "{"):
        assert "JSON object" in (await server.call("paint", arguments))["error"]["message"]
    await tools.aclose()
    methods = [method for method, _, _ in stub.asked]
    assert methods[:4] == ["initialize", "notifications/initialized", "tools/list", "tools/list"]
    headers = stub.asked[-1][2]
    assert (headers["authorization"], headers["x-a"]) == ("Bearer token", "b")
    assert (headers["mcp-session-id"], headers["mcp-protocol-version"]) == (
        "session-1",
        "2025-06-18",
    )
    assert stub.ended == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": 500}, "status 500"),
        ({"status": 302}, "status 302"),
        ({"raw": b"{"}, "no JSON"),
        ({"raw": b"[1]"}, "no message"),
        ({"raw": b'{"id": 2, "result": {"tools": [{"name": 5}]}}'}, "malformed"),
        ({"raw": b'{"id": 9, "result": {}}'}, "did not answer"),
        ({"raw": b"x" * 70_000}, "more than 65536 bytes"),
        ({"raw": b"[" * 60_000}, "no JSON"),
        ({"raw": b'{"id": 2, "result": {"tools": [], "nextCursor": "0"}}'}, "did not answer"),
        ({"seconds": 3.0}, "longer than 2 seconds"),
        ({"tools": TOOLS * 3, "page": 1}, "more than 8 tools"),
        ({"tools": TOOLS, "page": 0}, "more than 16 pages"),
    ],
)
async def test_a_server_that_misbehaves(stub, change, message):
    for name, value in change.items():
        setattr(stub, name, value)
    tools = Tools([tool(stub)], options(stub, max_bytes="64KiB", max_tools=8))
    with pytest.raises(ApiError, match=message) as caught:
        await tools.open()
    assert (caught.value.status, caught.value.body["error"]["param"]) == (424, "tools")


async def test_a_server_that_is_not_there():
    host = f"127.0.0.1:{free_port()}"
    own = {"type": "mcp", "server_label": "a", "server_url": f"http://{host}"}
    with pytest.raises(ApiError, match="cannot be reached"):
        await Tools([own], Options(private_hosts=[host])).open()


async def test_an_allowed_host_has_public_addresses(monkeypatch):
    """Whatever its name says: a name may be given any address."""

    def look_up(host, port, **_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    own = {"type": "mcp", "server_label": "a", "server_url": "https://mcp.example.com/"}
    with pytest.raises(ApiError, match="not public"):
        await Tools([own], Options(hosts=["mcp.example.com"])).open()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://other.example/", "not allowed"),
        ("https://mcp.example:8443/", "not allowed"),
        ("https://mcp.example.evil/", "not allowed"),
        ("http://mcp.example:443/", "not allowed"),
        ("http://mcp.example/", "must be one of https"),
        ("ftp://mcp.example/", "http"),
        ("https://user@mcp.example/", "user"),
        ("https://mcp.example\\@evil/", "backslash"),
        ("https://127.0.0.1/", "not allowed"),
        ("http://inside:9001/", "not allowed"),
        ("", "https"),
        ("https://" + "a" * 9000, "characters"),
    ],
)
def test_urls_that_are_refused(url, message):
    with pytest.raises(RefusedError, match=message):
        check_url(url, Options(hosts=["mcp.example"], private_hosts=["inside:9000"]))


def test_urls_that_are_allowed():
    allowed = Options(hosts=["mcp.example"], private_hosts=["inside:9000", "[::1]:80"])
    for url in (
        "https://MCP.example./x?y=z",
        "https://mcp.example:443/",
        "http://inside:9000/mcp",
        "http://[::1]/",
    ):
        assert check_url(url, allowed)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "a"},
        {"content-length": "5"},
        {"Mcp-Session-Id": "a"},
        {"a b": "c"},
        {"a": "b\r\nc: d"},
        {"a": 5},
        {"a": "x" * 9000},
        {"é": "a"},
        {f"h{number}": "a" for number in range(40)},
    ],
)
def test_headers_that_are_refused(headers):
    with pytest.raises(RefusedError):
        check_headers(headers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"server_label": "a b"}, "server_label"),
        ({"server_label": None}, "server_label"),
        ({"server_url": None}, "server_url"),
        ({"server_url": "https://elsewhere/"}, "not allowed"),
        ({"connector_id": "connector_gmail"}, "connector_id is not supported"),
        ({"headers": [1]}, "headers"),
        ({"authorization": 5}, "authorization"),
        ({"allowed_tools": "paint"}, "allowed_tools"),
        ({"allowed_tools": [5]}, "allowed_tools"),
        ({"require_approval": "sometimes"}, "require_approval"),
        ({"require_approval": {"never": 5}}, "require_approval.never"),
    ],
)
def test_tools_that_are_refused(stub, change, message):
    with pytest.raises(RequestError, match=message) as caught:
        Tools([{**tool(stub), **change}], options(stub))
    assert caught.value.param == "tools"


def test_so_many_servers(stub):
    two = [tool(stub), {**tool(stub), "server_label": "other"}]
    with pytest.raises(RequestError, match="more than 1 MCP servers"):
        Tools(two, options(stub, max_servers=1))
    with pytest.raises(RequestError, match="two servers"):
        Tools([tool(stub), tool(stub)], options(stub))


@pytest.mark.parametrize(
    ("fields", "allowed", "approved"),
    [
        ({}, ["paint", "look.up", "fail"], ["paint", "look.up", "fail"]),
        ({"require_approval": "never"}, ["paint", "look.up", "fail"], []),
        (
            {"require_approval": {"never": {"read_only": True}}},
            ["paint", "look.up", "fail"],
            ["paint", "fail"],
        ),
        (
            {"require_approval": {"never": {"tool_names": ["paint"]}}},
            ["paint", "look.up", "fail"],
            ["look.up", "fail"],
        ),
        ({"allowed_tools": ["paint"], "require_approval": "always"}, ["paint"], ["paint"]),
        ({"allowed_tools": {"read_only": True}}, ["look.up"], ["look.up"]),
    ],
)
async def test_which_tools(stub, fields, allowed, approved):
    tools = Tools([tool(stub, **fields)], options(stub))
    await tools.open()
    await tools.aclose()
    assert [one.name for one in tools.by_alias.values()] == allowed
    assert [one.name for one in tools.by_alias.values() if one.needs_approval] == approved


async def test_names_that_are_taken(stub):
    function = {"type": "function", "name": "paint"}
    tools = Tools([function, tool(stub), tool(stub, server_label="b")], options(stub))
    await tools.open()
    await tools.aclose()
    assert [*tools.by_alias] == [
        "wall__paint",
        "look_up",
        "fail",
        "b__paint",
        "b__look_up",
        "b__fail",
    ]
    assert tools.choice({"type": "mcp", "server_label": "b", "name": "look.up"}) == {
        "type": "function",
        "name": "b__look_up",
    }
    whole = tools.choice({"type": "mcp", "server_label": "wall"})
    assert (whole["mode"], len(whole["tools"])) == ("required", 3)
    with pytest.raises(RequestError, match="no server 'c'"):
        tools.choice({"type": "mcp", "server_label": "c"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"hosts": ["https://a"]},
        {"private_hosts": ["a/b"]},
        {"timeout": 0},
        {"max_bytes": "much"},
        {"max_calls": 0},
    ],
)
def test_options_that_make_no_sense(wrong):
    with pytest.raises(ConfigError):
        Options(**wrong)
