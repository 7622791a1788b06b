"""`--renderer-url`: an engine whose prompts are rendered by `toolkit render` elsewhere, and one renderer that dies midway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import httpx
import pytest
from render_servers import Renderers
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.errors import ConfigError, RequestError, ToolkitError
from toolkit_lm_server.app import create_app

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["Once upon a time", "The capital of Italy is", {"prompt_token_ids": [5, 6, 7]}]
OPTIONS = {"device": "cpu", "num_kv_blocks": 128, "max_model_len": 128, "max_num_seqs": 8, "engine_process": False}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def renderers() -> Iterator[Renderers]:
    made = Renderers()
    yield made
    made.close()


@pytest.fixture(scope="module")
def start(renderers) -> Callable[..., str]:
    return renderers.start


@pytest.fixture(scope="module")
def url(start) -> str:
    return start("tiny")


def test_tokens_and_answers_are_those_of_a_local_renderer(url):
    params = GREEDY.replace(stop=["."], bad_words=["Paris"])
    conversation = [*CHAT, {"role": "assistant", "content": "The capital"}]
    answers = []
    for where in ({}, {"renderer_url": [url]}):
        with LLM(model="tiny", **OPTIONS, **where) as llm:
            assert (llm.engine.config.renderer.renderer == "remote") is bool(where)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False) + llm.chat(CHAT, params, use_tqdm=False)
            outputs += llm.chat(conversation, params.replace(n=2), continue_final_message=True, add_generation_prompt=False, use_tqdm=False)
            answers.append([(one.prompt_token_ids, [(found.token_ids, found.text) for found in one.outputs]) for one in outputs])
    assert answers[0] == answers[1]


def test_a_prompt_that_is_too_long_is_cut_where_that_is_asked_for(url):
    with LLM(model="tiny", renderer_url=[url], **OPTIONS) as llm:
        long = "Once upon a time there was a cat. " * 100
        [output] = llm.generate([long], GREEDY.replace(truncate_prompt_tokens=8), use_tqdm=False)
        assert len(output.prompt_token_ids) == 8
        for ask in (lambda: llm.generate([long], GREEDY), lambda: llm.chat([{"role": "user", "content": long}], GREEDY)):
            with pytest.raises(RequestError, match="maximum context length"):
                ask()


@pytest.mark.parametrize(
    ("messages", "told"), [([], "empty"), ([{"role": "user", "content": "\ud800"}], "surrogate"), ([{"role": 5}], "role")]
)
def test_a_bad_conversation_is_an_error_of_the_request(url, messages, told):
    with LLM(model="tiny", renderer_url=[url], **OPTIONS) as llm:
        with pytest.raises(RequestError, match=told):
            llm.chat(messages, GREEDY, use_tqdm=False)
        assert llm.chat(CHAT, GREEDY, use_tqdm=False)[0].outputs[0].text


@pytest.mark.anyio
async def test_one_of_two_renderers_dies_midway(renderers):
    urls = [renderers.start("tiny"), renderers.start("tiny")]
    config = VllmConfig.make(model="tiny", renderer_url=urls, **OPTIONS)
    async with AsyncLLM(config) as llm:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(llm)), base_url="http://server", timeout=120)

        async def ask(number: int) -> tuple[int, str]:
            await asyncio.sleep(number * 0.02)
            question = [{"role": "user", "content": f"What is the capital of France? {number}"}]
            answer = await client.post("/v1/chat/completions", json={"messages": question, "max_tokens": 8, "temperature": 0})
            return answer.status_code, answer.text

        async with client:
            asked = asyncio.gather(*map(ask, range(100)))
            await asyncio.sleep(0.5)
            renderers.kill(urls[0])
            answers = await asked
            assert {status for status, _ in answers} == {200}
            # With both gone, who asks hears so, and may come again.
            renderers.kill(urls[1])
            status, text = await ask(0)
            assert (status, "renderer_unreachable" in text) == (503, True)
            assert urls[0] not in text
            given = await client.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 4})
            assert given.status_code == 200, "token ids need no renderer"


def test_no_renderer_need_be_there_at_the_start():
    with LLM(model="tiny", renderer_url=["http://127.0.0.1:9"], **OPTIONS) as llm:
        assert llm.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY, use_tqdm=False)[0].outputs[0].text
        with pytest.raises(ToolkitError, match="the render server gave no answer; it cannot be reached") as error:
            llm.generate(["Once"], GREEDY, use_tqdm=False)
        assert not isinstance(error.value, RequestError)


@pytest.mark.parametrize("wrong", ["here", "ftp://host", "http://", "http://user:key@host", "http://host:port"])
def test_what_is_no_address_is_refused_at_the_start(wrong):
    with pytest.raises(ConfigError, match="is not the address of a server"):
        LLM(model="tiny", renderer_url=[wrong], **OPTIONS)


def test_the_name_alone_is_not_enough():
    with pytest.raises(ToolkitError, match="give --renderer-url"):
        LLM(model="tiny", renderer="remote", **OPTIONS)
