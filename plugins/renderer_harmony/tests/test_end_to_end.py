"""gpt-oss through the server: a conversation is rendered as openai-harmony renders it, and the
channels of an answer become reasoning, calls and content."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Annotated

import httpx
import pytest

pytest.importorskip(
    "openai_harmony", reason="openai-harmony has an environment of its own: make test-renderers"
)

import torch
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.plugin import hookimpl
from toolkit_lm.sampling import LogitsProcessor
from toolkit_lm_devkit import randomize
from toolkit_lm_server.app import create_app
from transformers import GptOssConfig, GptOssForCausalLM

pytestmark = pytest.mark.anyio

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
QUESTION = {"role": "user", "content": "What is the weather in Rome?"}
THOUGHT = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
CALL = (
    f"{THOUGHT}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Rome"}<|call|>'
)
ANSWER = f"{THOUGHT}<|channel|>final<|message|>It is sunny.<|return|>"
DATE = {"chat_template_kwargs": {"conversation_start_date": "2026-01-02"}}


class ScriptParams(ProcessorParams):
    script: Annotated[str, param("The tokens of the answer, with spaces between.")] = ""

    def prepare(self, renderer):
        return {"ids": [int(one) for one in self.script.split()]} if self.script else None


class Script(LogitsProcessor):
    """Only the script's tokens can be drawn."""

    stage = "logits"

    def __init__(self, config, device):
        super().__init__(config, device)
        self.scripts = {}

    def add(self, row, arguments, state):
        self.scripts[row.key] = arguments["ids"]

    def remove(self, key):
        self.scripts.pop(key, None)

    def apply(self, values, rows):
        for row, scores in zip(rows, values, strict=True):
            position = len(row.token_ids) - row.num_prompt_tokens
            scores.fill_(float("-inf"))
            scores[self.scripts[row.key][position]] = 0.0
        return values


class Scripts:
    name = "scripts"

    @hookimpl
    def toolkit_register_logits_processors(self, processors):
        processors.add("script", "toolkit_lm_test_scripts:Script", params=ScriptParams)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
def folder(harmony_folder):
    """A gpt-oss checkpoint of two layers, with the vocabulary of gpt-oss."""
    config = GptOssConfig(
        vocab_size=201_088,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        eos_token_id=200_002,
        pad_token_id=199_999,
    )
    model = GptOssForCausalLM(config)
    randomize(model)
    model.to(torch.bfloat16).save_pretrained(harmony_folder)
    return harmony_folder


@pytest.fixture
async def client(folder, monkeypatch):
    stands = ModuleType("toolkit_lm_test_scripts")
    stands.Script = Script
    monkeypatch.setitem(sys.modules, stands.__name__, stands)
    config = VllmConfig.make(
        model=str(folder),
        num_kv_blocks=256,
        max_model_len=1024,
        kernels="torch",
        engine_process=False,
    )
    async with AsyncLLM(config, plugins=[Scripts()]) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as one:
            yield one


async def ask(client, renderer, messages, answer, **fields):
    """The response to a conversation whose answer is a text of the format."""
    token_ids = renderer._encoding.encode(answer, allowed_special="all")
    return await client.post(
        "/v1/chat/completions",
        json={
            "messages": messages,
            "tools": [WEATHER],
            "script": " ".join(map(str, token_ids)),
            "max_tokens": 100,
            **DATE,
            **fields,
        },
    )


async def test_a_call_and_its_result(client, renderer):
    """The prompt of each round is the one of openai-harmony, whose library `renderer` is."""
    response = await ask(client, renderer, [QUESTION], CALL, return_token_ids=True)
    assert response.status_code == 200, response.text
    body = response.json()
    rendered = renderer.render_conversation([QUESTION], tools=[WEATHER], **DATE)
    assert body["prompt_token_ids"] == rendered.token_ids
    choice = body["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning_content"] == "I look." and not message["content"]
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    messages = [
        QUESTION,
        message,
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    body = (await ask(client, renderer, messages, ANSWER, return_token_ids=True)).json()
    assert "I look." in renderer.decode(body["prompt_token_ids"])
    assert renderer.decode(body["prompt_token_ids"]).endswith(
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>sunny<|end|>"
        "<|start|>assistant"
    )
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("I look.", "It is sunny.")
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_a_stream_has_the_same_parts(client, renderer):
    response = await ask(client, renderer, [QUESTION], CALL, stream=True)
    events = [
        json.loads(line.removeprefix("data: "))
        for line in response.text.splitlines()
        if line.startswith("data: {")
    ]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "I look."
    assert not any(delta.get("content") for delta in deltas)
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    assert [call["name"] for call in calls if call.get("name")] == ["get_weather"]
    assert json.loads("".join(call.get("arguments") or "" for call in calls)) == {"city": "Rome"}


async def test_responses_have_items_for_each_channel(client, renderer):
    token_ids = renderer._encoding.encode(ANSWER, allowed_special="all")
    response = await client.post(
        "/v1/responses",
        json={
            "input": QUESTION["content"],
            "script": " ".join(map(str, token_ids)),
            "max_output_tokens": 100,
        },
    )
    assert response.status_code == 200, response.text
    items = {item["type"]: item for item in response.json()["output"]}
    assert list(items) == ["reasoning", "message"]
    assert items["message"]["content"][0]["text"] == "It is sunny."
