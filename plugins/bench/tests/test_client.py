"""The client: addresses, streams of events, and servers that do not keep to HTTP."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm_bench.client import Stream, parse_address


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1/models"),
        ("https://api.example.com/v1/", "https://api.example.com/v1/models"),
        ("http://[::1]/proxy/v1", "http://[::1]/proxy/v1/models"),
    ],
)
def test_addresses(url, address):
    assert str(parse_address(url) / "v1/models") == address


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a.b", "http://", "http://a:b", "http://[::1"]
)
def test_what_is_no_address(url):
    with pytest.raises(ConfigError, match="is not the address of a server"):
        parse_address(url)


def sample_of(*pieces, prompt=None):
    stream = Stream()
    for now, piece in enumerate(pieces, 1):
        stream.feed(now, piece)
    return stream.sample(0.0, prompt)


TEXT = b'data: {"choices": [{"text": "a"}]}\r\n\r\n'
END = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
USAGE = (
    b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 9}}\n\ndata: '
    b"[DONE]\n\n"
)


def test_the_times_of_a_stream():
    found = sample_of(b": ping\n\n", TEXT, TEXT[:9], TEXT[9:] + TEXT, END, USAGE)
    assert (found.ttft, found.gaps, found.e2el, found.text) == (2, [2, 0], 4, "aaa")
    assert (found.num_prompt_tokens, found.num_output_tokens, found.is_counted) == (4, 9, False)


def test_without_usage_events_are_counted():
    found = sample_of(TEXT, TEXT, END)
    assert (found.num_prompt_tokens, found.num_output_tokens, found.is_counted) == (0, 2, True)


def test_an_answer_without_text_has_a_time():
    found = sample_of(b": ping\n\n", END, USAGE)
    assert (found.ttft, found.e2el, found.num_output_tokens) == (2, 2, 9)


def test_reasoning_has_times_and_is_not_said():
    role = b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n'
    thought = b'data: {"choices": [{"delta": {"reasoning_content": "h"}}]}\n'
    said = b'data: {"choices": [{"delta": {"content": "b"}}]}\n'
    found = sample_of(role, thought, said, b"data: [DONE]\n")
    assert (found.ttft, found.e2el, found.text) == (2, 3, "b")


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([TEXT], "the answer broke off before its end"),
        (
            [TEXT, b'data: {"error": {"message": "out of luck"}}\n\n', b"data: [DONE]\n\n"],
            "out of luck",
        ),
        ([b'data: {"error": "no"}\n\n'], "no"),
        ([b"data: oops\n\n", b"data: [DONE]\n\n"], "an event is not one of OpenAI's API"),
    ],
)
def test_streams_that_fail(pieces, error):
    assert sample_of(*pieces).error.startswith(error)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = (
    b'HTTP/1.1 200 OK\r\nContent-Length: 25\r\nConnection: close\r\n\r\n{"data": [{"id": "raw"}]}'
)
EVENT = b"%x\r\n%b\r\n" % (len(TEXT), TEXT)


@pytest.fixture
def raw():
    """raw(answer): the address of a server that sends these bytes whatever it is asked, and hangs
    up."""
    listener = socket.create_server(("127.0.0.1", 0))
    num_connections = []

    def start(answer):
        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                num_connections.append(1)
                with connection:
                    asked = connection.recv(65536)
                    connection.sendall(MODELS if asked.startswith(b"GET") else answer)
                    connection.shutdown(socket.SHUT_WR)
                    # A socket that is closed with something unread takes back what it has sent.
                    with suppress(ConnectionError):
                        while connection.recv(65536):
                            pass

        threading.Thread(target=serve).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}", num_connections

    yield start
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "the server hung up"),
        (HEAD[:20], "the server hung up"),
        (HEAD + EVENT, "the server hung up"),
        (b"SSH-2.0-x\r\n\r\n", "the server's answer is not HTTP/1.1"),
        (HEAD + b"zz\r\n", "the server's answer is not HTTP/1.1"),
    ],
)
def test_answers_that_are_none(raw, bench, answer, reason):
    url, connections = raw(answer)
    code, _, err = bench("serve", "--url", url, "--num-prompts", 1, "--warmup", 0)
    assert code == 1 and err == f"error: 1 requests failed, the first with: {reason}\n"
    assert len(connections) == 2
