"""openapi-python-client: a client made of the server's /openapi.json, without a warning: chats,
streams, completions, embeddings, models, errors."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

import conftest

PARIS = "The capital of France is Paris."
_NAME = "made_of_openapi"


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> str:
    """The package that the generator made."""
    folder = tmp_path_factory.mktemp("made")
    document = folder / "openapi.json"
    # A server with a key shows no description.
    with conftest.serving(key=None) as url:
        document.write_text(httpx.get(f"{url}/openapi.json").raise_for_status().text)
    config = folder / "config.yml"
    config.write_text("post_hooks: []\n")
    command = [Path(sys.executable).parent / "openapi-python-client", "generate", "--meta", "none"]
    command += ["--fail-on-warning", "--config", config, "--path", document]
    done = subprocess.run(
        [*map(str, command), "--output-path", str(folder / _NAME)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(folder))
    return _NAME


@pytest.fixture
def client(made, url, key) -> Any:
    return importlib.import_module(made).AuthenticatedClient(base_url=url, token=key)


def operation(made: str, name: str) -> ModuleType:
    return importlib.import_module(f"{made}.api.default.{name}")


def models(made: str) -> ModuleType:
    return importlib.import_module(f"{made}.models")


def body(made: str, **more: Any) -> Any:
    kinds = models(made)
    message = kinds.ChatMessage(role="user", content="What is the capital of France?")
    return kinds.ChatBody(messages=[message], max_tokens=16, temperature=0.0, **more)


def test_a_chat(made, client):
    post = operation(made, "create_v1_chat_completions_post")
    answer = post.sync(client=client, body=body(made))
    assert answer.choices[0].message.content == PARIS
    assert answer.usage.completion_tokens > 0


def test_a_stream(made, client):
    """The generator has no streams. The request is the client's own, and events are of its
    classes where the document names them."""
    post = operation(made, "create_v1_chat_completions_post")
    request = post._get_kwargs(body=body(made, stream=True))
    with client.get_httpx_client().stream(**request) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data.pop() == "[DONE]"
    chunks = [json.loads(one) for one in data if not one.startswith(":")]
    deltas = [one["choices"][0]["delta"].get("content", "") for one in chunks if one["choices"]]
    assert "".join(deltas) == PARIS


def test_a_completion(made, client):
    post = operation(made, "create_v1_completions_post")
    asked = models(made).CompletionBody(prompt="Once upon a time", max_tokens=4, temperature=0.0)
    answer = post.sync(client=client, body=asked)
    assert answer.choices[0].text and answer.usage.completion_tokens == 4


def test_an_embedding(made, embed_url, key):
    client = importlib.import_module(made).AuthenticatedClient(base_url=embed_url, token=key)
    post = operation(made, "embed_v1_embeddings_post")
    asked = models(made).EmbeddingBody(input_=["Once upon a time", "Another"])
    answer = post.sync(client=client, body=asked)
    lengths = [len(one.embedding) for one in answer.data]
    assert len(lengths) == 2 and lengths[0] == lengths[1] > 8


def test_the_models(made, client):
    answer = operation(made, "models_v1_models_get").sync(client=client)
    assert [one.id for one in answer.data] == ["tiny"]


def test_an_error_is_of_its_class(made, client):
    post = operation(made, "create_v1_chat_completions_post")
    answer = post.sync(client=client, body=body(made, n=0))
    assert answer.error.param == "n" and isinstance(answer, models(made).ErrorBody)
