"""Tools for a model whose chat template knows none: the server tells of them, and a grammar holds
what begins like a call."""

from __future__ import annotations

import json

import pytest
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.tool_texts import with_tool_texts

pytestmark = pytest.mark.anyio

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS},
}
ASK = {"role": "user", "content": "What is the capital of France?"}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"days": 1}'}}
LINE = json.dumps(TOOL["function"])


def test_tools_are_told_in_the_text_of_messages():
    system = {"role": "system", "content": "Be short."}
    first, asked = with_tool_texts([system, ASK], [TOOL], parallel=False)
    assert asked == ASK and first["content"].startswith("Be short.\nYou can call functions.")
    assert first["content"].endswith(LINE) and "; " not in first["content"].split("\n")[1]
    [only] = with_tool_texts([ASK], [TOOL], parallel=True)
    assert only["content"].endswith(f"{LINE}\n{ASK['content']}")
    parts = [{"type": "image_url"}, {"type": "text", "text": "See?"}]
    [only] = with_tool_texts([{"role": "user", "content": parts}], [TOOL], parallel=True)
    assert only["content"][1:] == parts


def test_calls_and_results_are_texts():
    messages = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "b"}]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c", "content": "rainy"},
        {"role": "user", "content": "And?"},
    ]
    call = '{"name": "look", "parameters": {"days": 1}}'
    assert with_tool_texts(messages, [], parallel=True) == [
        ASK,
        {"role": "assistant", "content": f"{call}; {call}"},
        {
            "role": "user",
            "content": "The result of look:\nsunny\nThe result of a function:\nrainy\nAnd?",
        },
    ]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "plain.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    config = VllmConfig.make(
        model="tiny",
        chat_template=str(template),
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
        engine_process=False,
    )
    engine = AsyncLLM(config)
    yield engine
    engine.close()


async def whole_and_streamed(client, body):
    body = {"temperature": 0, "max_tokens": 80, **body}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    message = choice["message"]
    lines = (
        await client.post("/v1/chat/completions", json={**body, "stream": True})
    ).text.splitlines()
    content = ""
    calls = []
    for line in lines:
        for one in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            content += one["delta"].get("content") or ""
            for call in one["delta"].get("tool_calls", ()):
                if "id" in call:
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert content == (message["content"] or "")
    assert calls == [call["function"] for call in message.get("tool_calls", ())]
    return choice


async def test_a_model_whose_template_knows_no_tools_may_call(engine, client_of):
    async with client_of(create_app(engine, ServerOptions())) as client:
        body = {"messages": [ASK], "tools": [TOOL]}
        choice = await whole_and_streamed(client, body)
        assert (choice["finish_reason"], choice["message"].get("tool_calls")) == ("stop", None)
        # Pushed to begin a call, it writes a whole one, of the schema.
        tokens = (await client.post("/tokenize", json={"prompt": '{"name": "'})).json()["tokens"]
        pushed = {**body, "logit_bias": {str(tokens[0]): 100, str(tokens[-1]): 20}}
        required = {**body, "tool_choice": "required", "parallel_tool_calls": False}
        for one in (pushed, required):
            choice = await whole_and_streamed(client, one)
            if one is pushed and choice["finish_reason"] != "tool_calls":
                continue
            [call] = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "look"
            assert json.loads(call["function"]["arguments"]).keys() == {"city", "days"}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "It is sunny."}
        messages = [ASK, choice["message"], result]
        assert (await whole_and_streamed(client, {**body, "messages": messages}))["message"]
        counted = [
            (await client.post("/v1/messages/count_tokens", json=one)).json()["input_tokens"]
            for one in (
                {"messages": [ASK]},
                {"messages": [ASK], "tools": [{"name": "look", "input_schema": PARAMETERS}]},
            )
        ]
        assert counted[1] > counted[0] + 20
