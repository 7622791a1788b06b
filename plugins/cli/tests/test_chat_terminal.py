"""`toolkit chat` at a terminal, with a model in its process and on a server."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pexpect
import pytest

CODE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from "
    "toolkit_lm_cli import main; main()"
)
READY = r"\x1b\[\?2004h"
"""The line editor waits for a line."""
CTRL_C = "\x03"
CTRL_D = "\x04"
ALT_ENTER = "\x1b\r"


class Scripted(BaseHTTPRequestHandler):
    """Answers with the question in bold; "wait" is answered by a word and then nothing."""

    asked: list = []
    over = threading.Event()

    def do_GET(self):
        self._send(
            "application/json",
            json.dumps({"data": [{"id": "scripted", "max_model_len": 4096}]}).encode(),
        )

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body["messages"])
        text = body["messages"][-1]["content"]
        events = [{"choices": [{"delta": {"content": part}}]} for part in ("**", text, "**")]
        if text == "wait":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                b"data: "
                + json.dumps({"choices": [{"delta": {"content": "begun"}}]}).encode()
                + b"\n\n"
            )
            self.over.wait()
            return
        events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
        self._send(
            "text/event-stream",
            b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
            + b"data: [DONE]\n\n",
        )

    def _send(self, kind, data):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_): ...


@pytest.fixture
def url():
    Scripted.asked = []
    Scripted.over.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        Scripted.over.set()
        server.shutdown()


class Terminal:
    def __init__(self, arguments, environ):
        environ = {
            **os.environ,
            "TERM": "xterm",
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "OMP_NUM_THREADS": "1",
            **environ,
        }
        arguments = ["-c", CODE, "chat", *map(str, arguments)]
        self._child = pexpect.spawn(
            sys.executable,
            arguments,
            env=environ,
            dimensions=(24, 80),
            encoding="utf-8",
            timeout=100,
        )

    def ready(self):
        """Text written until the next line can be entered, without the sequences that draw it."""
        self._child.expect(READY)
        return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", self._child.before).replace("\r", "")

    def say(self, text):
        self._child.send(f"{text}\r")
        return self.ready()

    def send(self, text):
        self._child.send(text)

    def expect(self, text):
        self._child.expect(text)

    def shows(self, text):
        return self._child.expect([text, pexpect.TIMEOUT], timeout=0.5) == 0

    def interrupt(self):
        self._child.kill(signal.SIGINT)

    def end(self):
        self._child.expect(pexpect.EOF)
        self._child.close()
        return self._child.exitstatus

    def close(self):
        self._child.close(force=True)


@pytest.fixture
def terminal(tmp_path):
    opened = []

    def call(*arguments):
        opened.append(Terminal(arguments, {"XDG_STATE_HOME": str(tmp_path / "state")}))
        return opened[-1]

    yield call
    for one in opened:
        one.close()


def test_a_model_in_its_process(terminal, tmp_path):
    chat = terminal("tiny", "--temperature", "0", "--max-tokens", "40")
    banner = chat.ready()
    for part in ("tiny", "bfloat16", "512 tokens of context", "/help"):
        assert part in banner
    shown = chat.say("What is the capital of France?")
    assert "The capital of France is Paris." in shown
    assert re.search(
        r"11 tokens, [\d.]+ tokens/s, first after [\d.]+ s, 28 of 512 in context", shown
    )
    assert "The capital of Italy is Rome." in chat.say("What is the capital of Italy?")
    assert "taken back: What is the capital of Italy?" in chat.say("/undo")
    assert "2 messages from" in chat.say(f"/save {tmp_path}/a.json") + chat.say(
        f"/load {tmp_path}/a.json"
    )
    chat.send("/exit\r")
    assert chat.end() == 0


def test_a_model_on_a_server_answers_in_markdown(terminal, url):
    chat = terminal("--url", url)
    banner = chat.ready()
    assert "scripted · 4,096 tokens of context" in banner and url in banner
    shown = chat.say("hello")
    assert (
        "**" not in shown.split("hello", 1)[1]
        and "3 tokens" in shown
        and "10 of 4,096 in context" in shown
    )
    chat.send("one" + ALT_ENTER + "two\\")
    chat.say("\rthree")
    assert Scripted.asked[-1][-1]["content"] == "one\ntwo\nthree"
    assert len(Scripted.asked[-1]) == 3
    chat.send(CTRL_D)
    assert chat.end() == 0


def test_an_interrupt_ends_the_answer_and_not_the_conversation(terminal, url):
    chat = terminal("--url", url)
    chat.ready()
    chat.send("wait\r")
    chat.expect("begun")
    chat.interrupt()
    assert "stopped" in chat.ready()
    chat.say("next")
    assert [message["content"] for message in Scripted.asked[-1]] == ["wait", "begun", "next"]
    chat.send("half a line" + CTRL_C)
    chat.ready()
    chat.say("whole")
    assert Scripted.asked[-1][-1]["content"] == "whole"
    chat.send(CTRL_D)
    assert chat.end() == 0


def test_an_interrupt_of_a_model_in_its_process(terminal):
    chat = terminal("tiny", "--ignore-eos", "--max-tokens", "400", "--no-markdown")
    chat.ready()
    chat.send("Tell a story.\r")
    chat.expect(r"\w+ \w+ \w+ \w+ ")
    chat.interrupt()
    assert re.search(r"stopped; \d+ tokens|400 tokens", chat.ready())
    assert "Rome" in chat.say("/clear") + chat.say("/set temperature=0 ignore_eos=") + chat.say(
        "What is the capital of Italy?"
    )
    chat.send(CTRL_D)
    assert chat.end() == 0


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_entered_is_kept_for_its_user_alone(terminal, url, tmp_path, keeps):
    chat = terminal("--url", url, "--history" if keeps else "--no-history")
    chat.ready()
    chat.say("a secret")
    chat.send(CTRL_D)
    chat.end()
    file = tmp_path / "state" / "toolkit-lm" / "chat_history"
    assert file.exists() is keeps
    if keeps:
        assert "+a secret" in file.read_text() and file.stat().st_mode & 0o77 == 0
        chat = terminal("--url", url)
        chat.ready()
        # The history is read in the background.
        while not chat.shows("a secret"):
            chat.send("\x1b[A")
        chat.say("")
        assert Scripted.asked[-1][-1]["content"] == "a secret"
