"""Errors in each vendor's shape: of the key check and the limits of bodies, too."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.anyio

HI = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/v1/messages": {**HI, "max_tokens": 2},
    "/v1/messages/count_tokens": HI,
    "/v2/chat": {**HI, "max_tokens": 2},
    "/api/chat": {**HI, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "hi", "options": {"num_predict": 2}},
    "/api/embed": {"input": "hi"},
    "/api/embeddings": {"prompt": "hi"},
    "/api/show": {},
}
NOT_GENERATED = ("/api/embed", "/api/embeddings")


def message_of(path: str, body: dict) -> str:
    """Checks the shape."""
    if path.startswith("/v1"):
        assert (
            set(body) == {"type", "error"}
            and body["type"] == "error"
            and set(body["error"]) == {"type", "message"}
        )
        return body["error"]["message"]
    assert set(body) == {"message" if path.startswith("/v2") else "error"}
    return body["message" if path.startswith("/v2") else "error"]


@pytest.mark.parametrize("path", BODIES)
async def test_the_key_is_checked(serve, path):
    async with serve("embed" if path in NOT_GENERATED else "generate", api_key="secret") as client:
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
            refused = await client.post(path, json=BODIES[path], headers=headers)
            assert refused.status_code == 401 and "API key" in message_of(path, refused.json())
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert (await client.post(path, json=BODIES[path], headers=headers)).status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_bodies_that_are_refused(serve, path):
    async with serve(
        "embed" if path in NOT_GENERATED else "generate", max_body_size="100KiB"
    ) as client:
        too_large = await client.post(path, content=b" " * 2**17)
        assert too_large.status_code == 413 and "max_body_size" in message_of(
            path, too_large.json()
        )
        for content in (b"", b"[1]", b"null", b'{"a": ', b'{"model": "\xff"}', b"[" * 5000):
            refused = await client.post(
                path, content=content, headers={"content-type": "application/json"}
            )
            assert refused.status_code == 400, content
            assert message_of(path, refused.json())
        unknown = await client.post(path, json={**BODIES[path], "model": "other"})
        assert unknown.status_code == 404 and "'other' does not exist" in message_of(
            path, unknown.json()
        )


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/api/chat"])
async def test_halves_of_characters_in_arguments(serve, path):
    """They are as in any text: the renderer refuses them where its template writes them."""
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "\ud800"}}
    if path == "/api/chat":
        call = {"function": {"name": "f", "arguments": call["input"]}}
    said = {"role": "assistant"} | (
        {"tool_calls": [call]} if path == "/api/chat" else {"content": [call]}
    )
    body = {**BODIES[path], "messages": [*HI["messages"], said, *HI["messages"]]}
    async with serve() as client:
        response = await client.post(
            path, content=json.dumps(body), headers={"content-type": "application/json"}
        )
        assert response.status_code in (200, 400), response.text


@pytest.mark.parametrize("path", BODIES)
async def test_values_of_another_type(serve, path):
    """Wherever they stand, they are refused or have no effect: nothing is a failure of the
    server."""
    values = (None, -1.5, "x", [None], {"type": 5}, [{}], [{"type": {}}])
    async with serve("embed" if path in NOT_GENERATED else "generate") as client:
        schema = (await client.get("/openapi.json")).json()
        name = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"][
            "schema"
        ]["$ref"].rpartition("/")[2]
        for field in schema["components"]["schemas"][name]["properties"]:
            for value in values:
                response = await client.post(
                    path, json={**BODIES[path], "stream": False, field: value}
                )
                assert response.status_code in (200, 400, 404), (field, value, response.text[:300])
                if response.status_code != 200:
                    assert message_of(path, response.json())


@pytest.mark.parametrize("path", ["/v1/messages", "/v2/chat", "/api/chat"])
async def test_messages_of_another_type(serve, path):
    values = (
        None,
        5,
        "x",
        [],
        [5],
        {},
        {"type": 5},
        [{}],
        [{"type": {}}],
        [{"type": "image", "source": 5}],
        [{"type": "tool_result", "content": 5}],
    )
    async with serve() as client:
        for role in ("user", "assistant", "tool", 5):
            for field in ("content", "images", "tool_calls", "thinking", "tool_plan"):
                for value in values:
                    body = {
                        **BODIES[path],
                        "messages": [{"role": role, "content": "hi", field: value}],
                        "stream": False,
                    }
                    response = await client.post(path, json=body)
                    assert response.status_code in (200, 400), (
                        json.dumps(body),
                        response.text[:300],
                    )


@pytest.mark.parametrize(
    ("path", "field", "budget"),
    [
        ("/v1/messages", "thinking.budget_tokens", {"budget_tokens": 1024}),
        ("/v2/chat", "thinking.token_budget", {"token_budget": 9}),
    ],
)
async def test_a_budget_that_cannot_be_held_to_is_told(serve, path, field, budget):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "thinking": {"type": "enabled", **budget},
    }
    both = f"{field}, thinking.type"
    for options, told in (
        ({}, both),
        ({"strict_fields": True}, both),
        ({"reasoning_parser": "think"}, None),
    ):
        async with serve(**options) as client:
            reply = await client.post(path, json=body)
            assert (reply.status_code, reply.headers.get("x-ignored-fields")) == (200, told), (
                reply.text
            )
            none = await client.post(path, json={**body, "thinking": {"type": "disabled"}})
            # Reasoning that is found cannot be turned off by a template that does not read of it.
            turned_off = "thinking.type" if told is None else None
            assert (none.status_code, none.headers.get("x-ignored-fields")) == (200, turned_off)


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        (
            "/v1/chat/completions",
            {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
        ),
        (
            "/v1/chat/completions",
            {"chat_template_kwargs": {"enable_thinking": False, "add_generation_prompt_": 1}},
            "chat_template_kwargs.add_generation_prompt_",
        ),
        ("/v1/chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("/v1/chat/completions", {"reasoning_effort": "none"}, None),
        ("/v1/chat/completions", {}, None),
        ("/api/chat", {"think": True, "stream": False}, "think"),
        ("/api/chat", {"think": False, "stream": False}, None),
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "low"}}, "reasoning.effort"),
    ],
)
async def test_what_the_chat_template_does_not_read_is_told(serve, path, fields, told):
    """tiny's reads the messages alone."""
    body = (
        fields if "input" in fields else {"messages": [{"role": "user", "content": "hi"}], **fields}
    )
    async with serve() as client:
        reply = await client.post(path, json=body)
        assert (reply.status_code, reply.headers.get("x-ignored-fields")) == (200, told), reply.text
        wrong = {"messages": body.get("messages", []), "chat_template_kwargs": {"a\nb": 1}}
        refused = await client.post("/v1/chat/completions", json=wrong)
        assert refused.status_code == 400
