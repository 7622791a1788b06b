"""The routes, served by an app with an engine of its own, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from fastapi.testclient import TestClient
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions

TEXT = "Once upon a time"
CONFIG = {
    "model": "tiny",
    "device": "cpu",
    "dtype": "float32",
    "engine_process": False,
    "num_kv_blocks": 128,
    "plugin_option": {"recap": {"max_tokens": 5}},
}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with closing(AsyncLLM(VllmConfig.make(**CONFIG))) as engine:
        app = create_app(engine, ServerOptions(routes=("recap",)))
        with TestClient(app) as client:
            yield client


def test_its_lifespan_is_entered(client):
    answer = client.get("/recap")
    assert answer.status_code == 200
    assert answer.json()["model"] == "tiny" and answer.json()["is_open"] is True


def test_a_recap_is_the_servers_chat(client):
    answer = client.post("/recap", json={"text": TEXT})
    assert answer.status_code == 200, answer.text
    message = {"role": "user", "content": f"In short: {TEXT}"}
    fields = {"messages": [message], "max_tokens": 5, "temperature": 0}
    chat = client.post("/v1/chat/completions", json=fields).json()
    assert answer.json()["recap"] == chat["choices"][0]["message"]["content"]
    assert 0 < answer.json()["tokens"] <= 5


def test_a_title_is_the_engines_text(client):
    answer = client.post("/recap/title", json={"text": TEXT})
    assert answer.status_code == 200, answer.text
    fields = {"prompt": TEXT, "max_tokens": 8, "temperature": 0}
    completion = client.post("/v1/completions", json=fields).json()
    assert answer.json()["title"] == completion["choices"][0]["text"] != ""


@pytest.mark.parametrize("body", [{}, {"text": ""}, {"text": 3}], ids=str)
def test_a_wrong_body_is_an_error_of_openais_form(client, body):
    answer = client.post("/recap", json=body)
    assert answer.status_code == 400
    assert "text" in answer.json()["error"]["message"]
