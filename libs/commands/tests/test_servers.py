"""What a command says of a server's answer."""

from __future__ import annotations

import http.server
import json
import threading

import pytest
from toolkit_lm.errors import ToolkitError
from toolkit_lm_commands import ask_server


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        message = "No adapter 'x'." if self.path == "/adapters/x" else "Not Found"
        body = json.dumps({"error": {"message": message}}).encode()
        self.send_response(404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def url():
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_route_that_the_server_lacks_is_named(url):
    with pytest.raises(ToolkitError, match=f"{url} has no GET /kv/prefixes: an option opens it"):
        ask_server("GET", url, "/kv/prefixes", None)


def test_a_thing_that_the_server_lacks_is_as_it_says(url):
    with pytest.raises(ToolkitError, match=r"refused the request \(404\): No adapter 'x'"):
        ask_server("GET", url, "/adapters/x", None)
