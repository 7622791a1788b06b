"""`toolkit chat` and `complete` against a server: a scripted one, over real HTTP."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

STREAM = {"stream": True, "stream_options": {"include_usage": True}}


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
        # A client that has read an error hangs up, and need not wait for the rest.


class Scripted(BaseHTTPRequestHandler):
    """Serves one model, which answers with the words that it was asked, one event each; some words
    make it fail, or wait."""

    asked: list = []
    over = threading.Event()

    def do_GET(self):
        if self.headers.get("Authorization") == "Bearer wrong":
            self._error(401, "Invalid API key.")
        elif self.path == "/v1/models":
            self._json(200, {"data": [{"id": "scripted", "max_model_len": 4096}]})
        else:
            self._json(404, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        text = text if isinstance(text, str) else text[-1]["text"]
        if text == "long" and len(body["messages"]) > 1:
            self._error(400, "That is too long.", "context_length_exceeded")
            return
        if text == "refuse":
            self._error(400, "That is too long.")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        events = [
            {"delta": {"role": "assistant"}},
            *({"delta": {"content": word}, "text": word} for word in text.split()),
        ]
        for choice in events:
            self._event({"choices": [choice]})
        if text == "wait":
            self.over.wait()
        if text == "fail":
            self._event({"error": {"message": "The engine has stopped."}})
        if text != "break":
            self._event(
                {
                    "choices": [],
                    "usage": {"prompt_tokens": 7, "completion_tokens": len(text.split())},
                }
            )
            self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")

    def _event(self, event):
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _error(self, status, message, code=None):
        self._json(status, {"error": {"message": message, "code": code}})

    def _json(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    Scripted.asked = []
    Scripted.over.clear()
    with Server(("127.0.0.1", 0), Scripted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        Scripted.over.set()
        server.shutdown()


def test_chat_sends_what_was_given_and_prints_the_stream(toolkit, url):
    done = toolkit(
        "chat",
        "--url",
        url + "/v1/",
        "--message",
        "good day",
        "--system",
        "Be brief.",
        "--temperature",
        "0.5",
        "--seed",
        "3",
    )
    assert done == (0, "goodday\n", "")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "good day"}]
    assert Scripted.asked == [
        {"model": "scripted", **STREAM, "messages": messages, "temperature": 0.5, "seed": 3}
    ]


def test_images_go_with_the_first_message(toolkit, url, monkeypatch, tmp_path):
    (tmp_path / "a.png").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"de")
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        for kind, data in (("image/png", "YWJj"), ("application/octet-stream", "ZGU="))
    ]
    images = ["--image", str(tmp_path / "a.png"), "--image", str(tmp_path / "b")]
    monkeypatch.setattr("sys.stdin", iter_lines("one two\n", "three\n"))
    assert toolkit("chat", "--url", url, *images, "--system", "Brief.").out == "onetwo\nthree\n"
    system, first, *rest = [message["content"] for message in Scripted.asked[-1]["messages"]]
    assert (system, first) == ("Brief.", [*parts, {"type": "text", "text": "one two"}])
    assert rest == ["onetwo", "three"]
    assert toolkit("chat", "--url", url, *images, "--message", "four").out == "four\n"
    assert Scripted.asked[-1]["messages"][0]["content"][-1] == {"type": "text", "text": "four"}


def test_recordings_go_with_the_first_message(toolkit, url, tmp_path):
    parts = []
    for name, format in (("a.WAV", "wav"), ("b.mp3", "mp3"), ("c", "wav")):
        (tmp_path / name).write_bytes(b"abc")
        parts.append({"type": "input_audio", "input_audio": {"data": "YWJj", "format": format}})
    files = [word for name in ("a.WAV", "b.mp3", "c") for word in ("--audio", str(tmp_path / name))]
    image = ["--image", str(tmp_path / "c")]
    assert toolkit("chat", "--url", url, *files, *image, "--message", "four").out == "four\n"
    first, *rest, text = Scripted.asked[-1]["messages"][0]["content"]
    assert (first["type"], rest, text) == ("image_url", parts, {"type": "text", "text": "four"})


def test_when_a_conversation_starts_anew_its_images_do_too(toolkit, url, monkeypatch, tmp_path):
    (tmp_path / "a.png").write_bytes(b"abc")
    monkeypatch.setattr("sys.stdin", iter_lines("one\n", "long\n"))
    done = toolkit("chat", "--url", url, "--image", str(tmp_path / "a.png"))
    assert done.out == "one\nlong\n"
    assert "is forgotten" in done.err
    [message] = Scripted.asked[-1]["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none.png", "No such file"),
        ("", "Is a directory"),
        ("empty.png", "is empty"),
        ("big.png", "has more than"),
    ],
)
@pytest.mark.parametrize("flag", ["--image", "--audio"])
def test_a_file_that_cannot_be_sent_is_told_at_once(toolkit, url, tmp_path, name, why, flag):
    (tmp_path / "empty.png").touch()
    with (tmp_path / "big.png").open("wb") as file:
        file.truncate(2**35)
    done = toolkit("chat", "--url", url, flag, str(tmp_path / name), "--message", "a")
    assert (done.code, Scripted.asked) == (2, [])
    assert why in done.err and flag in done.err


def test_complete_names_the_model_that_was_given(toolkit, url):
    assert toolkit("complete", "other", "--url", url, "--prompt", "a b", "--max-tokens", "5") == (
        0,
        "ab\n",
        "",
    )
    assert Scripted.asked == [{"model": "other", **STREAM, "prompt": "a b", "max_tokens": 5}]


def test_the_text_to_complete_may_stand_after_the_model(toolkit, url, monkeypatch):
    assert toolkit("complete", "other", "a b", "--url", url) == (0, "ab\n", "")
    assert [body["prompt"] for body in Scripted.asked] == ["a b"]
    done = toolkit("complete", "other", "a b", "--url", url, "--prompt", "c")
    assert done.code == 2 and "there is a TEXT already" in done.err
    monkeypatch.setattr("sys.stdin", iter_lines("a b\n", "c\n"))
    assert toolkit("complete", "--url", url).out == "ab\nc\n"


def test_a_model_without_a_text_is_no_silent_success(toolkit, url, monkeypatch):
    """What was meant as a text is the model's name."""
    monkeypatch.setattr("sys.stdin", iter_lines("\n"))
    done = toolkit("complete", "--url", url, "The capital of Italy is")
    assert done.code == 2 and done.out == ""
    assert "'TEXT'" in done.err and "--prompt TEXT" in " ".join(done.err.split())


def test_a_conversation_holds_what_was_said(toolkit, url, monkeypatch):
    monkeypatch.setattr("sys.stdin", iter_lines("one two\n", "\n", "three\n"))
    assert toolkit("chat", "--url", url).out == "onetwo\nthree\n"
    assert [m["content"] for m in Scripted.asked[-1]["messages"]] == ["one two", "onetwo", "three"]


def iter_lines(*lines):
    import io

    return io.StringIO("".join(lines))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--prompt", "refuse"], "the server refused the request (400): That is too long."),
        (["--prompt", "fail"], "the server failed on the request: The engine has stopped."),
        (["--prompt", "break"], "the server's answer broke off before its end."),
        (
            ["--prompt", "x", "--api-key", "wrong"],
            "the server refused the request (401): Invalid API key.",
        ),
    ],
)
def test_an_error_of_the_server_is_one_error(toolkit, url, arguments, error):
    done = toolkit("complete", "--url", url, *arguments)
    assert (done.code, done.err) == (1, f"error: {error}\n")


def test_an_error_leaves_no_connection_to_a_server_that_keeps_it(toolkit, url, monkeypatch):
    """Python would warn of it when it collects garbage, and the test server would wait for it."""
    monkeypatch.setattr(Scripted, "protocol_version", "HTTP/1.1")
    assert toolkit("complete", "--url", url, "--prompt", "x", "--api-key", "wrong").code == 1
    gc.collect()


def test_where_no_server_answers(toolkit):
    done = toolkit("complete", "--url", "http://127.0.0.1:1", "--prompt", "x")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: no answer from the server at http://127.0.0.1:1: ")
    done = toolkit("complete", "--url", "nonsense", "--prompt", "x")
    assert (
        done.code,
        done.err.startswith("error: --url: 'nonsense' is not the address of a server: "),
    ) == (2, True)
    assert toolkit("complete", "given", "--url", "nonsense", "--prompt", "x").code == 2


def test_an_interrupt_ends_it_quietly_and_no_torch_is_imported(url):
    code = (
        "import atexit, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from toolkit_lm_cli import main\n"
        "atexit.register(lambda: sys.stderr.write(str('torch' in sys.modules)))\nmain()"
    )
    arguments = [sys.executable, "-c", code, "chat", "--url", url]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdin.write(b"wait\n")
        process.stdin.flush()
        # It reads an answer that does not end. What Python runs while it takes objects apart could
        # swallow the interrupt.
        assert process.stdout.read(4) == b"wait"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == b"False"
