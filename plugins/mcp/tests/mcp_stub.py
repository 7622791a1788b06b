"""A small MCP server over streamable HTTP, which misbehaves where a test asks it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOOLS = [
    {
        "name": "paint",
        "description": "Paints a wall.",
        "inputSchema": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
    {
        "name": "look.up",
        "description": "Looks something up.",
        "inputSchema": {"type": "object", "properties": {}},
        "annotations": {"readOnlyHint": True},
    },
    {"name": "fail", "inputSchema": {"type": "object"}},
]


class Stub:
    """What the server does, and what it was asked."""

    def __init__(self) -> None:
        self.tools: list[dict[str, Any]] = TOOLS
        self.in_events = False
        self.page = 2
        self.status = 200
        self.raw: bytes | None = None
        """Sent in place of an answer to tools/list."""
        self.seconds = 0.0
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        """Methods with their params and headers."""
        self.ended = 0
        self.url = ""

    def answer(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            return {
                "result": {
                    "protocolVersion": params["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "stub", "version": "1"},
                }
            }
        if method == "tools/list":
            first = int(params.get("cursor", 0))
            found = {"tools": self.tools[first : first + self.page]}
            if first + self.page < len(self.tools):
                found["nextCursor"] = str(first + self.page)
            return {"result": found}
        if method != "tools/call":
            return {"error": {"code": -32601, "message": "no such method"}}
        match params["name"]:
            case "paint":
                text = f"It is {params['arguments']['colour']}."
                return {"result": {"content": [{"type": "text", "text": text}], "isError": False}}
            case "fail":
                content = [{"type": "text", "text": "no paint"}]
                return {"result": {"content": content, "isError": True}}
            case "look.up":
                return {
                    "result": {"content": [{"type": "image", "data": "AAAA", "mimeType": "x/y"}]}
                }
        return {"error": {"code": -32602, "message": "no such tool"}}


class Handler(BaseHTTPRequestHandler):
    stub: Stub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_DELETE(self) -> None:
        self.stub.ended += 1
        self.send(200, b"", "text/plain")

    def do_POST(self) -> None:
        stub = self.stub
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        stub.asked.append((message["method"], message.get("params", {}), headers))
        if "id" not in message:
            self.send(202, b"", "text/plain")
            return
        if message["method"] != "initialize" and headers.get("mcp-session-id") != "session-1":
            self.send(400, b"", "text/plain")
            return
        time.sleep(stub.seconds if message["method"] != "initialize" else 0)
        found = stub.answer(message["method"], message.get("params", {}))
        body = json.dumps({"jsonrpc": "2.0", "id": message["id"], **found}).encode()
        if message["method"] == "tools/list":
            if stub.raw is not None:
                body = stub.raw
            if stub.status != 200:
                self.send(stub.status, b"", "text/plain")
                return
        if stub.in_events:
            noise = (
                b'event: message\r\ndata: {"jsonrpc": "2.0", "method": "notifications/x"}\r\n\r\n'
            )
            self.send(200, noise + b"data: %b\r\n\r\n" % body, "text/event-stream")
        else:
            self.send(200, body, "application/json")

    def send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("mcp-session-id", "session-1")
        if status == 302:
            self.send_header("location", "http://169.254.169.254/")
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving() -> Iterator[Stub]:
    """A server on a port of its own."""
    stub = Stub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"stub": stub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}/mcp"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
