"""A server that speaks OpenAI's API as a test tells it to, over real HTTP."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from toolkit_lm_cli.app import run


class ScriptedServer(ThreadingHTTPServer):
    """Answers with `max_tokens` words. What tests change are its attributes."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.asked: list[dict] = []
        """Bodies of requests for answers, in order of their arrival."""
        self.headers: list[dict] = []
        self.num_connections = 0
        self.under_way = 0
        self.most_under_way = 0
        self.lock = threading.Lock()
        self.has_usage = True
        self.models = [{"id": "scripted"}]
        self.refuse = lambda number: None
        """Number of a request, from 0 -> (status, body), or None."""
        self.gate = threading.Event()
        """Answers wait for it after their first word."""
        self.gate.set()
        self.hangs_up = False
        """Closes each connection after its first reply, without saying so."""
        self.events = None
        """Lines that are sent in place of an answer, each a piece of its own."""

    def finish_request(self, request, client_address):
        with self.lock:
            self.num_connections += 1
        super().finish_request(request, client_address)

    def handle_error(self, request, client_address):
        """A client that hangs up is not logged."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self._reply(200, {"object": "list", "data": self.server.models})

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            number = len(server.asked)
            server.asked.append(body | {"path": self.path})
            server.headers.append(dict(self.headers.items()))
            server.under_way += 1
            server.most_under_way = max(server.most_under_way, server.under_way)
        if refusal := server.refuse(number):
            self._leave()
            self._reply(*refusal)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in server.events or self._answer(body, number):
            self._chunk(piece)
        self._leave()
        self._chunk(b"")
        self.close_connection = server.hangs_up

    def _answer(self, body, number):
        is_chat = self.path.endswith("/chat/completions")
        if is_chat:
            yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for index in range(body["max_tokens"]):
            word = f" a{number}w{index}"
            yield _event(
                {
                    "choices": [
                        {
                            "index": 0,
                            **({"delta": {"content": word}} if is_chat else {"text": word}),
                        }
                    ]
                }
            )
            self.server.gate.wait(20)
        yield _event(
            {
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": "length",
                        **({"delta": {}} if is_chat else {"text": ""}),
                    }
                ]
            }
        )
        if self.server.has_usage and body["stream_options"]["include_usage"]:
            size = len(body["messages"]) if is_chat else len(body["prompt"])
            yield _event(
                {
                    "choices": [],
                    "usage": {"prompt_tokens": size, "completion_tokens": body["max_tokens"]},
                }
            )
        yield b"data: [DONE]\n\n"

    def _leave(self):
        with self.server.lock:
            self.server.under_way -= 1

    def _chunk(self, data):
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def _reply(self, status, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _event(data) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


@pytest.fixture
def server():
    one = ScriptedServer()
    thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield one
    one.gate.set()
    one.shutdown()
    thread.join()
    one.server_close()


@pytest.fixture
def bench(capsys):
    """bench("serve", ...): exit code, stdout, stderr of `toolkit bench`, in this process."""

    def call(*arguments):
        code = run(["bench", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return call
