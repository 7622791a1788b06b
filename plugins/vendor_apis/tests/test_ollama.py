"""Ollama's routes."""

from __future__ import annotations

import json

import pytest
from toolkit_lm_vendor_apis.ollama.body import OllamaChatBody
from toolkit_lm_vendor_apis.ollama.output import ChatAnswerParts, Clock, Output

pytestmark = pytest.mark.anyio

ASK = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "options": {"temperature": 0, "num_ctx": 4096},
}
PARIS = "The capital of France is Paris."


def lines_of(response) -> list[dict]:
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


async def test_chat(serve):
    async with serve() as client:
        lines = lines_of(await client.post("/api/chat", json={**ASK, "model": "small:latest"}))
        assert "".join(line["message"]["content"] for line in lines) == PARIS
        assert {line["model"] for line in lines} == {"small:latest"}
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        whole = (await client.post("/api/chat", json={**ASK, "stream": False})).json()
        assert whole["message"] == {"role": "assistant", "content": PARIS}
        for last in (lines[-1], whole):
            assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == (
                "stop",
                17,
                11,
            )
            assert (
                last["total_duration"]
                == last["prompt_eval_duration"] + last["eval_duration"]
                > last["eval_duration"]
                > 0
            )
        cut = (
            await client.post(
                "/api/chat", json={**ASK, "stream": False, "options": {"num_predict": 2}}
            )
        ).json()
        assert (cut["done_reason"], cut["eval_count"]) == ("length", 2)
        assert (await client.post("/api/chat", json={"model": "tiny"})).json()[
            "done_reason"
        ] == "load"
        refused = await client.post("/api/chat", json={**ASK, "options": {"temperature": -1}})
        assert refused.json()["error"].startswith("options.temperature must be")


@pytest.mark.parametrize("how", [{}, {"raw": True}])
async def test_generate(serve, how):
    prompt = "Once upon a time" if how else "What is the capital of France?"
    async with serve() as client:
        body = {"prompt": prompt, "options": {"temperature": 0}, **how}
        lines = lines_of(await client.post("/api/generate", json=body))
        whole = (await client.post("/api/generate", json={**body, "stream": False})).json()
        assert "".join(line["response"] for line in lines) == whole["response"]
        # Without num_predict it goes on to its end.
        assert whole["response"] == PARIS if not how else whole["eval_count"] > 20
        assert whole["done_reason"] == lines[-1]["done_reason"] == "stop"
        refused = await client.post("/api/generate", json={**body, "template": "x"})
        assert refused.status_code == 400 and refused.json()["error"].startswith(
            "template is not supported"
        )


async def test_formats(serve):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    async with serve() as client:
        reply = (
            await client.post("/api/chat", json={**ASK, "stream": False, "format": schema})
        ).json()
        assert list(json.loads(reply["message"]["content"])) == ["ok"]
        refused = await client.post("/api/chat", json={**ASK, "format": "yaml"})
        assert 'format must be "json"' in refused.json()["error"]


async def test_vectors(serve):
    async with serve("embed") as client:
        reply = (
            await client.post(
                "/api/embed", json={"model": "tiny", "input": ["one", "two"], "dimensions": 128}
            )
        ).json()
        assert [len(vector) for vector in reply["embeddings"]] == [128, 128] and reply[
            "prompt_eval_count"
        ] > 1
        [vector] = (await client.post("/api/embed", json={"input": "one"})).json()["embeddings"]
        assert (await client.post("/api/embeddings", json={"prompt": "one"})).json()[
            "embedding"
        ] == pytest.approx(vector)
        long = {"input": "word " * 500}
        assert (await client.post("/api/embed", json=long)).status_code == 200
        assert (
            await client.post("/api/embed", json={**long, "truncate": False})
        ).status_code == 400


async def test_bodies_need_not_say_that_they_are_json(serve):
    """Requests without a content type are accepted, like curl's; a page of another site could send
    them, too."""
    content = json.dumps({**ASK, "stream": False})
    async with serve() as client:
        for headers in (
            {},
            {"content-type": "application/x-www-form-urlencoded"},
            {"content-type": "text/plain", "x-request-id": "mine"},
        ):
            response = await client.post("/api/chat", content=content, headers=headers)
            assert response.json()["message"]["content"] == PARIS
            assert response.headers["x-request-id"] == headers.get(
                "x-request-id", response.headers["x-request-id"]
            )
            refused = await client.post(
                "/api/chat", content=content, headers={**headers, "origin": "https://elsewhere"}
            )
            assert refused.status_code == 400


async def test_models(serve):
    async with serve() as client:
        tags = (await client.get("/api/tags")).json()["models"]
        assert [one["name"] for one in tags] == ["tiny", "small"] and len(
            {one["digest"] for one in tags}
        ) == 2
        assert [
            one["context_length"] for one in (await client.get("/api/ps")).json()["models"]
        ] == [256, 256]
        assert (await client.get("/api/version")).json()["version"]
        card = (await client.post("/api/show", json={"model": "tiny:latest"})).json()
        assert (card["capabilities"], card["model_info"]["llama.context_length"]) == (
            ["completion", "tools"],
            256,
        )
        assert (await client.post("/api/show", json={"model": "other"})).status_code == 404


async def test_reasoning_and_calls(said):
    calls = [
        {"function": {"name": "f", "arguments": {"x": 1}}},
        {"function": {"name": "g", "arguments": {}}},
    ]
    output = Output("m", ChatAnswerParts(said(), thinks=True), Clock(), is_chat=True)
    await output.read()
    whole = output.whole()
    assert whole["message"] == {
        "role": "assistant",
        "content": "I call",
        "thinking": "hm so",
        "tool_calls": calls,
    }
    assert whole["done_reason"] == "stop"
    lines = [
        line
        async for lines in Output(
            "m", ChatAnswerParts(said(), thinks=False), Clock(), is_chat=True
        ).lines()
        for line in lines
    ]
    assert [call for line in lines for call in line["message"].get("tool_calls", [])] == calls
    assert not any("thinking" in line["message"] for line in lines)


def test_messages_are_those_of_a_chat():
    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("f", "g")]
    fields = OllamaChatBody(
        messages=[
            {"role": "user", "content": "see", "images": ["/9j/4AAQSkZJRg=="]},
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
            {"role": "tool", "content": "2", "tool_name": "g"},
            {"role": "tool", "content": "1", "tool_name": "f"},
        ],
        think="high",
        options={
            "num_predict": -1,
            "top_k": 0,
            "repeat_penalty": 1.5,
            "stop": ["x"],
            "num_gpu": 99,
        },
    ).chat()
    user, assistant, *results = fields["messages"]
    assert user["content"][1] == {
        "type": "image_url",
        "image_url": {"url": "data:image/jpeg;base64,/9j/4AAQSkZJRg=="},
    }
    assert assistant["reasoning_content"] == "hm"
    assert [call["function"] for call in assistant["tool_calls"]] == [
        {"name": name, "arguments": '{"x": 1}'} for name in ("f", "g")
    ]
    assert [one["tool_call_id"] for one in results] == [
        call["id"] for call in reversed(assistant["tool_calls"])
    ]
    assert (fields["repetition_penalty"], fields["stop"]) == (1.5, ["x"])
    assert not {"max_tokens", "top_k", "num_gpu"} & set(fields)
    assert (fields["chat_template_kwargs"], fields["reasoning_effort"]) == (
        {"enable_thinking": True},
        "high",
    )
