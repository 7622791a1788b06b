"""ollama: chats, prompts, streams, tools, formats, embeddings, the lists of models, loading and
unloading several models, errors, async."""

from __future__ import annotations

import asyncio
import json
import time

import ollama
import pytest

ASK = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
COLD = {"temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}


@pytest.fixture
def client(url, key):
    return ollama.Client(host=url, headers={"Authorization": f"Bearer {key}"})


def test_chat(client):
    reply = client.chat(model="tiny", messages=ASK, options=COLD)
    assert (reply.message.content, reply.done_reason, reply.eval_count) == (PARIS, "stop", 11)
    assert reply.total_duration > reply.eval_duration > 0
    parts = [*client.chat(model="tiny:latest", messages=ASK, options=COLD, stream=True)]
    assert "".join(part.message.content for part in parts) == PARIS and parts[-1].done
    assert list(
        json.loads(
            client.chat(model="tiny", messages=ASK, format=SCHEMA, options=COLD).message.content
        )
    ) == ["on"]


def test_generate(client):
    assert client.generate(model="tiny", prompt=ASK[0]["content"], options=COLD).response == PARIS
    parts = client.generate(
        model="tiny",
        prompt="Once upon a time",
        raw=True,
        options={**COLD, "num_predict": 4},
        stream=True,
    )
    assert "".join(part.response for part in parts)


def test_tools_are_taken(client):
    def light(on: bool) -> str:
        """Switches a light.

        Args:
            on: whether it is to be on.
        """
        return "done"

    assert client.chat(
        model="tiny", messages=ASK, tools=[light], options={**COLD, "num_predict": 8}
    ).message
    call = {"function": {"name": "light", "arguments": {"on": True}}}
    conversation = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_name": "light"},
    ]
    assert client.chat(model="tiny", messages=conversation, options={"num_predict": 4}).message


def test_embeddings(embed_url, key):
    client = ollama.Client(host=embed_url, headers={"Authorization": f"Bearer {key}"})
    found = client.embed(model="tiny", input=["one", "two"]).embeddings
    assert len(found) == 2
    assert [*client.embeddings(model="tiny", prompt="one").embedding] == pytest.approx([*found[0]])


def test_models(client):
    assert [model.model for model in client.list().models] == ["tiny"]
    assert client.ps().models[0].context_length > 0
    card = client.show("tiny")
    assert "completion" in card.capabilities and card.modelinfo["general.architecture"] == "llama"


def test_several_models_are_managed(pool_url, key):
    client = ollama.Client(host=pool_url, headers={"Authorization": f"Bearer {key}"})
    assert [model.model for model in client.list().models] == ["chat", "other"]
    assert client.ps().models == []
    # A model is described without its being loaded.
    card = client.show("other")
    assert "completion" in card.capabilities and card.modelinfo["general.architecture"] == "llama"
    assert client.ps().models == []
    assert client.chat(model="chat", messages=ASK, options=COLD).message.content == PARIS
    # An empty prompt loads a model.
    assert client.generate(model="other", keep_alive="5m").done_reason == "load"
    [chat, other] = client.ps().models
    assert (chat.model, other.model) == ("chat", "other") and other.expires_at
    # And unloads it.
    assert client.generate(model="other", keep_alive=0).done_reason == "unload"
    wait_for(lambda: [model.model for model in client.ps().models] == ["chat"])
    # So does keep_alive=0 of a request that asks something.
    reply = client.generate(model="chat", prompt=ASK[0]["content"], options=COLD, keep_alive=0)
    assert reply.response == PARIS
    wait_for(lambda: client.ps().models == [])
    assert [part.done_reason for part in client.chat(model="chat", keep_alive=0, stream=True)] == [
        "unload"
    ]
    with pytest.raises(ollama.ResponseError, match="'chat'") as error:
        client.generate(model="chatt", prompt="a")
    assert error.value.status_code == 404


def wait_for(condition) -> None:
    for _ in range(300):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it does not come")


def test_errors(client, url):
    with pytest.raises(ollama.ResponseError, match="does not exist") as error:
        client.chat(model="llama3", messages=ASK)
    assert error.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="API key"):
        ollama.Client(host=url).list()


def test_async(url, key):
    async def run() -> list[str]:
        client = ollama.AsyncClient(host=url, headers={"Authorization": f"Bearer {key}"})
        replies = await asyncio.gather(
            *(client.chat(model="tiny", messages=ASK, options=COLD) for _ in range(3))
        )
        return [reply.message.content for reply in replies]

    assert asyncio.run(run()) == [PARIS] * 3
