"""Budgets of reasoning over HTTP: in chats streamed or whole, with tools and structures, and as
other vendors name them."""

from __future__ import annotations

import json

import httpx
import pytest
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio
TEMPLATE = (
    "{# </think> <tool_call> #}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}\n"
    "A:<think>\n{% endif %}"
)
BUDGET = 9
CHAT = "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "Two and two?"}],
    "max_tokens": 120,
    "seed": 1,
    "thinking_token_budget": BUDGET,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["letters", "tokens"])
def engine(request, checkpoint_with):
    folder = checkpoint_with(TEMPLATE, ("<think>", "</think>") if request.param == "tokens" else ())
    options = {
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 8,
        "engine_process": request.param == "tokens",
    }
    one = AsyncLLM(VllmConfig.make(model=str(folder), served_model_name="thinker", **options))
    yield one
    one.close()


@pytest.fixture
async def client(engine):
    app = create_app(engine, ServerOptions())
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test", timeout=60
    ) as one:
        yield one


async def asked(client, body, path=CHAT):
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(client, body):
    """The messages of a stream, and its usage."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines = (await client.post(CHAT, json=body)).text.splitlines()
    messages: dict[int, dict[str, str]] = {}
    for line in lines:
        if not line.startswith("data: {"):
            continue
        told = json.loads(line.removeprefix("data: "))
        for choice in told["choices"]:
            message = messages.setdefault(
                choice["index"], {"reasoning": "", "content": "", "arguments": "", "reason": ""}
            )
            for name in ("reasoning", "content"):
                message[name] += choice["delta"].get(name) or ""
            message["arguments"] += "".join(
                call["function"]["arguments"] for call in choice["delta"].get("tool_calls", ())
            )
            message["reason"] = choice["finish_reason"] or message["reason"]
    return messages, told["usage"]


@pytest.mark.parametrize(
    "more",
    [
        {"n": 3},
        {"thinking_token_budget": 0},
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [TOOL]},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": TOOL["function"]["parameters"]},
            }
        },
    ],
)
async def test_reasoning_has_its_budget_and_the_answer_goes_on(client, more):
    body = {**BODY, **more}
    whole = await asked(client, body)
    messages, usage = await streamed(client, body)
    assert all(
        usage[name] == whole["usage"][name]
        for name in ("completion_tokens", "completion_tokens_details")
    )
    most = body["thinking_token_budget"]
    n = body.get("n", 1)
    # A grammar of characters lets one come to its end.
    assert most * n <= usage["completion_tokens_details"]["reasoning_tokens"] <= (most + 3) * n
    for choice in whole["choices"]:
        message = choice["message"]
        part = messages[choice["index"]]
        assert part["reason"] == choice["finish_reason"]
        assert part["reasoning"] == message.get("reasoning_content", "") and bool(
            part["reasoning"]
        ) == bool(most)
        assert part["content"] == (message["content"] or "")
        if "tool_choice" in more:
            assert json.loads(part["arguments"])["a"] in (1, 2) and not part["content"]
        elif "response_format" in more:
            assert json.loads(part["content"])["a"] in (1, 2)
        else:
            assert part["content"]


async def test_what_cannot_be_is_refused(client):
    for budget, words in (
        (-2, "at least -1"),
        (1.5, "thinking_token_budget"),
        ("x", "thinking_token_budget"),
    ):
        refused = await client.post(CHAT, json={**BODY, "thinking_token_budget": budget})
        assert refused.status_code == 400 and words in refused.text
    refused = await client.post(CHAT, json={**BODY, "thinking_format": "nope"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (
        400,
        "thinking_format",
    ) and "mistral_think" in refused.text
    assert (await asked(client, BODY))["choices"]


async def test_responses_and_completions_have_the_field(client):
    body = {
        "input": "Two and two?",
        "max_output_tokens": 60,
        "seed": 1,
        "thinking_token_budget": BUDGET,
    }
    usage = (await asked(client, body, "/v1/responses"))["usage"]
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (
        60,
        {"reasoning_tokens": BUDGET},
    )
    body = {"prompt": "A:<think>\n", "max_tokens": 40, "seed": 1, "thinking_token_budget": 0}
    assert (await asked(client, body, "/v1/completions"))["choices"][0]["text"].startswith(
        "</think>"
    )


async def test_other_vendors_names_of_it(client):
    message = await asked(
        client,
        {
            "messages": BODY["messages"],
            "max_tokens": 60,
            "temperature": 0.0,
            "thinking": {"type": "enabled", "budget_tokens": BUDGET},
        },
        "/v1/messages",
    )
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    off = await asked(
        client, {"messages": BODY["messages"], "max_tokens": 60, "temperature": 0.0}, "/v1/messages"
    )
    assert off["content"] == []
    body = {
        "messages": BODY["messages"],
        "max_tokens": 60,
        "temperature": 0.0,
        "thinking": {"type": "enabled", "token_budget": BUDGET},
    }
    assert [
        part["type"] for part in (await asked(client, body, "/v2/chat"))["message"]["content"]
    ] == ["thinking", "text"]
    wrong = {
        "messages": BODY["messages"],
        "max_tokens": 60,
        "temperature": 0.0,
        "thinking": {"type": "enabled", "budget_tokens": "many"},
    }
    assert (await client.post("/v1/messages", json=wrong)).status_code == 400


async def test_a_stop_text_counts_after_the_reasoning_alone(client):
    """It comes in the reasoning of all of these answers, and in the content of all."""
    body = {**BODY, "n": 2, "ignore_eos": True}
    before = {
        choice["index"]: choice["message"] for choice in (await asked(client, body))["choices"]
    }
    both = set.intersection(
        *({*one["reasoning_content"]} & {*one["content"]} for one in before.values())
    )
    stop = min(
        both, key=lambda one: min(message["content"].index(one) for message in before.values())
    )
    whole = await asked(client, {**body, "stop": stop})
    messages, usage = await streamed(client, {**body, "stop": stop})
    assert usage == whole["usage"]
    for choice in whole["choices"]:
        message = choice["message"]
        old = before[choice["index"]]
        part = messages[choice["index"]]
        assert message["reasoning_content"] == part["reasoning"] == old["reasoning_content"]
        assert message["content"] == part["content"] == old["content"].partition(stop)[0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    # Nothing of a text that is completed is reasoning.
    body = {
        "prompt": "A:<think>\n",
        "max_tokens": 20,
        "seed": 1,
        "stop": "</think>",
        "thinking_token_budget": 3,
    }
    assert (await asked(client, body, "/v1/completions"))["choices"][0]["stop_reason"] == "</think>"
