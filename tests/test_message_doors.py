"""A null content beside calls, and a tool without parameters, through each door that takes a
conversation: one prompt comes of all."""

from __future__ import annotations

import httpx
import pytest
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.plugin import Plugins
from toolkit_lm_renderer_remote.renderer import RemoteRenderer
from toolkit_lm_renderer_remote.servers import RenderServers
from toolkit_lm_server.app import create_app
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.rendering import Rendering, create_render_app

pytestmark = pytest.mark.anyio
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name + ' ' + t.function.parameters.type + ';' }}{% "
    "endfor %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for c in m['tool_calls'] %}<call>{{ c.function.name + ' ' + c.function.arguments "
    "}}</call>{% endfor %}"
    "{% elif m['role'] == 'assistant' %}<said>{{ m['content'] }}</said>{% else %}<{{ m['role'] "
    "}}>{{ m['content'] }}{% endif %}{% endfor %}"
)
PROMPT = 'weather object;<user>?<call>weather {"city": "Paris"}</call><tool>21'
ARGUMENTS = '{"city": "Paris"}'
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
USER = {"role": "user", "content": "?"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "21"}
TOOL = {"type": "function", "function": {"name": "weather"}}
CHAT = {
    "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
    "tools": [TOOL],
}
ONE = CHAT | {"max_tokens": 1}
USE = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris"}}
BLOCKS = {
    "messages": [
        USER,
        {"role": "assistant", "content": [USE]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "21"}],
        },
    ],
    "tools": [{"name": "weather"}],
}
ITEMS = {
    "input": [
        USER,
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "call_1", "output": "21"},
    ],
    "tools": [{"type": "function", "name": "weather", "parameters": None}],
}
OLLAMA = {
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}],
        },
        {"role": "tool", "tool_name": "weather", "content": "21"},
    ],
    "tools": [TOOL],
    "stream": False,
    "options": {"num_predict": 1},
}
DOORS = {
    "/v1/chat/completions": (ONE, lambda found: found["usage"]["prompt_tokens"]),
    "/v1/chat/completions/batch": (
        ONE | {"messages": [CHAT["messages"]]},
        lambda found: found["usage"]["prompt_tokens"],
    ),
    "/v1/responses": (
        ITEMS | {"max_output_tokens": 1},
        lambda found: found["usage"]["input_tokens"],
    ),
    "/v1/messages": (
        BLOCKS | {"max_tokens": 1},
        lambda found: found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"],
    ),
    "/v1/messages/count_tokens": (BLOCKS, lambda found: found["input_tokens"]),
    "/v2/chat": (ONE, lambda found: found["usage"]["tokens"]["input_tokens"]),
    "/api/chat": (OLLAMA, lambda found: found["prompt_eval_count"]),
    "/tokenize": (CHAT, lambda found: found["count"]),
}
"""Body, and the place in its answer of the prompt's number of tokens, by path. Each letter is a
token with this tokenizer."""
POOLING = {"/v1/embeddings", "/classify", "/pooling", "/v2/embed"}
"""Doors of pooling models, which take conversations without calls."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(checkpoint_with):
    return checkpoint_with(TEMPLATE)


@pytest.fixture(scope="module")
def engine(folder):
    options = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "engine_process": False}
    one = AsyncLLM(VllmConfig.make(model=str(folder), served_model_name="model", **options))
    yield one
    one.close()


def client_of(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60)


@pytest.mark.parametrize("path", DOORS)
async def test_one_prompt_comes_of_all_doors(engine, path):
    body, count = DOORS[path]
    async with client_of(create_app(engine, ServerOptions(tool_call_parser="hermes"))) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert count(response.json()) == len(PROMPT)


async def test_the_doors_are_all_that_take_conversations(engine):
    described = create_app(engine, ServerOptions()).openapi()
    found = {
        path
        for path, told in described["paths"].items()
        if {"messages", "input"} & _fields(described, told)
    }
    texts = {
        path for path in found if "messages" not in _fields(described, described["paths"][path])
    } - {"/v1/responses"}
    assert found - texts - POOLING == set(DOORS)


def _fields(described, told):
    content = (
        told.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
    )
    schema = content.get("schema", {})
    for one in [schema, *schema.get("anyOf", ())]:
        if "$ref" in one:
            one = described["components"]["schemas"][one["$ref"].rpartition("/")[2]]
        if "properties" in one:
            return set(one["properties"])
    return set()


async def test_the_renderer_over_http_makes_the_same(folder):
    config = VllmConfig.make(model=str(folder), load_format="dummy")
    made = Rendering(config, Plugins.load(config.plugins))
    app = create_render_app(made, ServerOptions(), metrics=Metrics(), readiness=Readiness(made))
    async with client_of(app) as client:
        response = await client.post("/v1/chat/completions/render", json=CHAT)
    assert made.renderer.decode(response.json()["token_ids"]) == PROMPT


def test_llm_chat_makes_the_same(folder):
    llm = LLM(model=str(folder), load_format="dummy", dtype="float32", device="cpu")
    [output] = llm.chat(CHAT["messages"], SamplingParams(max_tokens=1), tools=CHAT["tools"])
    assert llm.engine.renderer.decode(output.prompt_token_ids) == PROMPT


DOCUMENTS = {"documents": [{"text": "of autumn"}]}
UNREAD = (
    "documents: the chat template does not read them, only: messages, tools. Put their texts "
    "into a message."
)
NOT_OURS = {
    "/v2/chat": "documents is not supported by this server: put the texts into a message.",
    "/v1/responses": "documents is not supported by this server: ask /v1/chat/completions.",
}
"""Doors that take documents for no template."""


@pytest.mark.parametrize("options", [{}, {"strict_fields": True}])
async def test_documents_that_the_template_does_not_read_are_refused_at_each_door(engine, options):
    app = create_app(engine, ServerOptions(**options))
    described = app.openapi()
    # Fields that are refused whatever they say are not described.
    paths = [
        path
        for path in DOORS
        if path in NOT_OURS or "documents" in _fields(described, described["paths"][path])
    ]
    assert {"/v1/chat/completions", "/tokenize", *NOT_OURS} <= set(paths)
    async with client_of(app) as client:
        for path in paths:
            given = (
                {"input": "?"}
                if path == "/v1/responses"
                else {"messages": [[USER]] if path.endswith("batch") else [USER]}
            )
            for more in (
                [{}] if path == "/tokenize" or path.endswith("batch") else [{}, {"stream": True}]
            ):
                body = {"model": "model", **given, **more, **DOCUMENTS}
                reply = await client.post(path, json=body)
                told = reply.json().get("error", reply.json())
                assert (reply.status_code, told["message"]) == (400, NOT_OURS.get(path, UNREAD)), (
                    path
                )
                assert "x-ignored-fields" not in reply.headers
                assert path in NOT_OURS or told["param"] == "documents"


class ServedHere(httpx.ASGITransport):
    """For clients of both kinds, of which only the one that is awaited asks."""

    def close(self):
        pass


async def test_documents_that_the_template_does_not_read_are_refused_by_a_renderer_and_through_it(
    folder,
):
    config = VllmConfig.make(model=str(folder), load_format="dummy")
    made = Rendering(config, Plugins.load(config.plugins))
    app = create_render_app(made, ServerOptions(), metrics=Metrics(), readiness=Readiness(made))
    async with client_of(app) as client:
        reply = await client.post(
            "/v1/chat/completions/render", json={"messages": [USER], **DOCUMENTS}
        )
    assert (
        reply.status_code,
        reply.json()["error"]["message"],
        reply.json()["error"]["param"],
    ) == (400, UNREAD, "documents")
    remote = RemoteRenderer(made.config.replace(renderer_url=["http://here"]))
    remote._servers = RenderServers(["http://here"], transport=ServedHere(app))
    with pytest.raises(RequestError) as failure:
        await remote.render_conversation_async([USER], **DOCUMENTS)
    assert (str(failure.value), failure.value.param) == (UNREAD, "documents")


def test_documents_that_the_template_does_not_read_are_refused_by_llm_chat(folder):
    llm = LLM(model=str(folder), load_format="dummy", dtype="float32", device="cpu")
    with pytest.raises(RequestError) as failure:
        llm.chat([USER], SamplingParams(max_tokens=1), documents=DOCUMENTS["documents"])
    assert (str(failure.value), failure.value.param) == (UNREAD, "documents")
