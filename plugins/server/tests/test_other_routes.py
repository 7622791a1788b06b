"""Routes of vLLM and SageMaker: /invocations, /ping, /load, /tokenizer_info."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from toolkit_lm.config import VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio
HI = {"messages": [{"role": "user", "content": "hi"}]}


async def test_invocations_answer_as_the_route_that_is_meant(client, engine):
    for path, body in (("/v1/chat/completions", HI), ("/v1/completions", {"prompt": "ab", "n": 2})):
        one, other = [
            (await client.post(which, json=body)).json() for which in ("/invocations", path)
        ]
        assert (one["object"], one["choices"]) == (other["object"], other["choices"])
    stream = (await client.post("/invocations", json={**HI, "stream": True})).text
    assert stream.endswith("data: [DONE]\n\n")
    # The model generates: these say so, as their own routes do.
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/pooling", {"input": "a", "task": "dance"}),
    ):
        one, other = [
            (await client.post(which, json=body)).json() for which in ("/invocations", path)
        ]
        assert one["error"]["message"] == other["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, None, "It needs one of: messages, prompt, input, query, queries, text_1"),
        ({"model": "fake"}, None, "the fields of no route"),
        ({"prompt": "a", "temperature": -1}, "temperature", "temperature"),
        ({"messages": "hi"}, "messages", "must be a list"),
        ([], None, "must be a JSON object"),
    ],
)
async def test_wrong_invocations(client, body, param, message):
    reply = await client.post("/invocations", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param) and message in error["message"], (
        error
    )


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_is_health(engine, client_of, method):
    async with client_of(create_app(engine, ServerOptions(api_key="secret"))) as client:
        assert (await client.request(method, "/ping")).status_code == 200
        engine.status = "starting"
        assert (await client.request(method, "/ping")).status_code == 503


async def test_load_counts_what_is_under_way(client, engine):
    async def load() -> int:
        return (await client.get("/load")).json()["server_load"]

    assert await load() == 0
    asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": ["hang", "hang"]}))
    while not engine.num_open:
        await asyncio.sleep(0.01)
    assert await load() == 2
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert await load() == 0


async def test_the_config_of_the_tokenizer(make_engine, client_of, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Fast", "eos_token": "</s>"})
    )
    engine = make_engine(tokenizer=str(tmp_path))
    async with client_of(create_app(engine)) as client:
        assert (await client.get("/tokenizer_info")).status_code == 404
    async with client_of(create_app(engine, ServerOptions(tokenizer_info=True))) as client:
        found = (await client.get("/tokenizer_info")).json()
        assert found == {"tokenizer_class": "Fast", "eos_token": "</s>", "chat_template": None}
        (tmp_path / "tokenizer_config.json").unlink()
        assert (await client.get("/tokenizer_info")).json() == {
            "tokenizer_class": "",
            "chat_template": None,
        }
    assert VllmConfig.make().renderer.tokenizer is None


async def test_the_description_tells_what_is_sent(engine, client_of):
    """Each answer has a schema, and what is wrong with a body is a 400, not FastAPI's 422."""
    options = ServerOptions(admin_routes=True, tokenizer_info=True)
    async with client_of(create_app(engine, options, metrics=Metrics())) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    for path, operations in paths.items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"], (method, path)
            for status, response in operation["responses"].items():
                for kind, content in response.get("content", {}).items():
                    assert content.get("schema") or content.get("itemSchema"), (
                        method,
                        path,
                        status,
                        kind,
                    )


async def test_a_wrong_method_is_told_all_right_ones(engine, client_of):
    async with client_of(create_app(engine, ServerOptions(max_stored_responses=1))) as client:
        for path, allowed in (
            ("/ping", "GET, POST"),
            ("/v1/responses/x", "DELETE, GET"),
            ("/load", "GET"),
        ):
            response = await client.put(path)
            assert (response.status_code, response.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "/chat/completions", "/chat/completions/"]
)
async def test_a_path_without_its_version_or_with_a_slash_is_the_same(client, path):
    reply = await client.post(path, json=HI)
    expected = (await client.post("/v1/chat/completions", json=HI)).json()
    assert reply.status_code == 200 and reply.json()["choices"] == expected["choices"]
    assert (await client.get(path)).status_code == 405


async def test_other_spellings_of_lists_and_states(client):
    expected = [one["id"] for one in (await client.get("/v1/models")).json()["data"]]
    for path in ("/models", "/models/", "/v1/models/"):
        assert [one["id"] for one in (await client.get(path)).json()["data"]] == expected
    assert (await client.get("/models/fake")).json()["id"] == "fake"
    assert (await client.get("/version/")).json() == (await client.get("/version")).json()
    assert (await client.get("/health/")).status_code == 200


async def test_other_spellings_need_the_key_too(engine, client_of):
    async with client_of(create_app(engine, ServerOptions(api_key="secret"))) as client:
        assert (await client.post("/chat/completions", json=HI)).status_code == 401
        headers = {"authorization": "Bearer secret"}
        found = await client.post("/chat/completions/", json=HI, headers=headers)
        assert found.status_code == 200


async def test_other_spellings_behind_a_prefix(engine):
    """The server puts back the prefix that a proxy has stripped."""
    app = create_app(engine, ServerOptions(root_path="/llm"))
    transport = httpx.ASGITransport(app=app, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in ("/llm/chat/completions", "/llm/v1/chat/completions/", "/llm/v1/models/"):
            reply = await client.request("GET" if "models" in path else "POST", path, json=HI)
            assert reply.status_code == 200, path


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/v1/audio/speech", "no model here speaks"),
        ("/audio/speech", "no model here speaks"),
        ("/v1/realtime", "stream /v1/chat/completions"),
        ("/v1/images/generations", "makes images"),
        ("/v1/files/file-1/content", "batches.folder"),
        ("/v1/moderations", "model that classifies"),
        ("/v1/conversations", "send the whole one"),
    ],
)
async def test_routes_that_are_missing_say_why(client, path, reason):
    reply = await client.post(path, json={})
    error = reply.json()["error"]
    assert reply.status_code == 404 and reason in error["message"]
    assert error["type"] == "invalid_request_error" and path in error["message"]


@pytest.mark.parametrize(
    "path", ["/", "//", "/nothing", "/v1", "/v1/", "/v1/nothing/", "/v1/filess"]
)
async def test_unknown_paths_stay_unknown(client, path):
    reply = await client.get(path)
    assert (reply.status_code, reply.json()["error"]["message"]) == (404, "Not Found")
