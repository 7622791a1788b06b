"""Streams over a connection, whose model is being loaded or has no room."""

from __future__ import annotations

import json
import os
import re
import signal

from pool_server import SMALL, served, write_models
from toolkit_lm_model_pool.need import PROCESS

MIB = 2**20
BODY = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def lines_of(server, name: str):
    """The lines of a stream that are not empty, as they come."""
    body = {"model": name, "stream": True, **BODY}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield from filter(None, answer.iter_lines())


def text_of(lines: list[str]) -> str:
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
    return "".join(event["choices"][0]["text"] for event in events)


def test_a_stream_is_told_how_far_a_load_is(tmp_path):
    """The process of the engine stands still meanwhile, so that the load takes long enough."""
    path = write_models(tmp_path / "models.yaml", {"chat": "tiny"})
    with served(tmp_path, "--models", path, "--models-memory", "4GiB") as server:
        [engine] = server.engines()
        os.kill(engine, signal.SIGSTOP)
        lines = lines_of(server, "chat")
        try:
            comments = [next(lines) for _ in range(2)]
        finally:
            os.kill(engine, signal.SIGCONT)
        assert all(re.fullmatch(r": loading chat \d+%", line) for line in comments)
        rest = [line for line in lines if line[:1] != ":"]
        assert rest[-1] == "data: [DONE]"
        answer = server.client.post("/v1/completions", json={"model": "chat", **BODY}).json()
        assert text_of(rest) == answer["choices"][0]["text"]
        assert server.engines() == [engine]
        assert server.cards()["chat"]["loads"] == 1


def test_a_stream_that_finds_no_room_is_told_while_it_waits_and_why(tmp_path):
    models = dict.fromkeys(("chat", "story"), "tiny")
    path = write_models(tmp_path / "models.yaml", models, chat={"pin": True, "options": SMALL})
    budget = str(PROCESS + 100 * MIB)
    arguments = ["--models", path, "--models-memory", budget, "--models-timeout", "3"]
    with served(tmp_path, *arguments) as server:
        server.until("chat", "ready")
        lines = [*lines_of(server, "story")]
        comments = [line for line in lines if line[:1] == ":"]
        assert comments and {*comments} == {": waiting for story"}
        [event, end] = [line for line in lines if line[:1] != ":"]
        assert end == "data: [DONE]"
        error = json.loads(event.removeprefix("data: "))["error"]
        assert error["code"] == "model_loading"
        assert "'story' was not loaded within 3 s" in error["message"]
        assert "'chat' (ready" in error["message"]
        assert server.cards()["story"]["loads"] == 0
