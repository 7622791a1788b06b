"""The API key is told to nobody, and what clients send forges no line of the log."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from faulty_server import PROGRAM, Server

KEY = "SECRET-123"
FORGED = 'INFO:     127.0.0.1:1 - "GET /forged HTTP/1.1" 200 OK'


@pytest.fixture(params=["environment", pytest.param("file", marks=pytest.mark.slow)])
def guarded(request, serve, tmp_path) -> Server:
    """A server that takes its key from the environment or from the config file."""
    file = tmp_path / "options.yaml"
    file.write_text(f"api_key: {KEY}\n" if request.param == "file" else "{}\n")
    environ = {"TOOLKIT_LM_API_KEY": KEY} if request.param == "environment" else {}
    return serve(
        "--config", str(file), "--access-log", "--log-level", "debug", **environ
    ).wait_ready()


def pages(server: Server, key: str | None) -> str:
    """Responses that a client can read with this key, headers included."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    paths = (
        "/docs",
        "/redoc",
        "/openapi.json",
        "/metrics",
        "/version",
        "/live",
        "/health",
        "/ready",
        "/v1/models",
        "/",
        "/nothing",
    )
    bodies = (
        {"prompt": "a", "max_tokens": 1},
        {"prompt": 5},
        {"prompt": "a", "model": "x"},
        {"prompt": "a", "api_key": "x"},
    )
    with httpx.Client(base_url=server.url, headers=headers, timeout=30) as client:
        found = [client.get(path) for path in paths] + [
            client.post("/v1/completions", json=body) for body in bodies
        ]
        with client.stream("GET", "/ui/events") as stream:
            # Events of the page: the server, its log, the engine.
            news = "".join(line for _, line in zip(range(8), stream.iter_lines(), strict=False))
    return "\n".join([*(f"{one.status_code} {one.headers} {one.text}" for one in found), news])


def test_the_key_is_told_to_nobody(guarded):
    right, wrong, none = (pages(guarded, key) for key in (KEY, "wrong-key", None))
    assert (
        "toolkit_lm_engine_status" in right
        and '"type":"log"' in right
        and '"type":"view"' in right
        and "invalid_api_key" in wrong
        and "invalid_api_key" in none
    )
    assert all(KEY not in text and "wrong-key" not in text for text in (right, wrong, none))
    titles = [Path(f"/proc/{pid}/cmdline").read_text() for pid in guarded.pids()]
    assert len(titles) == 2 and not any(KEY in title for title in titles)
    guarded.process.terminate()
    code, log = guarded.end()
    assert code == 0
    assert '"POST /v1/completions HTTP/1.1" 401' in log
    assert KEY not in log and "wrong-key" not in log


def test_the_titles_of_processes_tell_the_model_and_no_key(serve):
    server = serve("--api-key", KEY).wait_ready()
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0") for pid in server.pids()}
    assert titles.pop(server.process.pid) == "toolkit-lm serve tiny"
    assert list(titles.values()) == ["toolkit-lm engine tiny"]


@pytest.mark.parametrize(
    "arguments", [["explain", "tiny", "--json"], ["env"], ["serve", "tiny", "--port", "none"]]
)
def test_commands_do_not_print_the_key(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_LM_API_KEY", KEY)
    done = subprocess.run([sys.executable, *PROGRAM, *arguments], capture_output=True, text=True)
    assert done.stdout + done.stderr
    assert KEY not in done.stdout + done.stderr


def raw(server: Server, message: bytes) -> bytes:
    """The server's answer to bytes that may not be HTTP."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(message)
        return connection.recv(2**16)


def test_no_line_of_the_log_is_forged(serve):
    server = serve("--access-log", "--log-level", "debug").wait_ready()
    breaks = f"\r\n{FORGED}\r\n\x1b[2J\u2028{FORGED}\x85{FORGED}"
    with httpx.Client(base_url=server.url, timeout=30) as client:
        quoted = "".join(f"%{byte:02x}" for byte in breaks.encode())
        for path in (f"/{quoted}", f"/v1/models/{quoted}", f"/version?a={quoted}"):
            assert client.get(path).status_code in (200, 404)
        for body in (
            {"prompt": "a", "model": breaks},
            {"prompt": "a", breaks: 5},
            {"prompt": "a", "user": breaks, "cache_salt": breaks, "max_tokens": 1},
            {"prompt": "a", "stop": 5, "metadata": {breaks: breaks}},
        ):
            assert client.post("/v1/completions", json=body).status_code in (200, 400, 404)
        bad = {
            "messages": [{"role": breaks, "content": breaks}],
            "chat_template_kwargs": {breaks: breaks},
            "max_tokens": 1,
        }
        assert client.post("/v1/chat/completions", json=bad).status_code in (200, 400)
    for header in ("x-request-id", "traceparent", "user-agent", "x-forwarded-for", "authorization"):
        # h11 refuses a bare line break, folds a folded line and knows Latin-1.
        for value in (
            f"a\n{FORGED}",
            f"a\r\n {FORGED}",
            f"a\r{FORGED}",
            f"a\x85{FORGED}",
            "1.2.3.4 \x1b[2J",
        ):
            assert raw(
                server,
                f"GET /version HTTP/1.1\r\nhost: x\r\n{header}: {value}\r\n\r\n".encode("latin-1"),
            ).startswith(b"HTTP/1.1 ")
    for target in (
        f"/a\n{FORGED}",
        f"/a?\r{FORGED}",
        "/a?\x1b[2J",
        f"/a\x85{FORGED}".replace(" ", "_"),
    ):
        raw(server, f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode("latin-1"))
    server.process.terminate()
    code, log = server.end()
    assert code == 0
    assert "/v1/models/%0D%0AINFO" in log
    assert FORGED not in log
    assert not re.search(r"[^\n\x20-\x7e]", log)
