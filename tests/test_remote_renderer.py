"""`--renderer-url`: an engine whose prompts are rendered by `toolkit render` elsewhere, and one
renderer that dies midway."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing, closing

import httpx
import pytest
from render_servers import Renderers
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.errors import ConfigError, RequestError, ToolkitError
from toolkit_lm_server.app import create_app

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["Once upon a time", "The capital of Italy is", {"prompt_token_ids": [5, 6, 7]}]
OPTIONS = {
    "device": "cpu",
    "num_kv_blocks": 128,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "engine_process": False,
}


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
            outputs = llm.generate(PROMPTS, params, use_tqdm=False) + llm.chat(
                CHAT, params, use_tqdm=False
            )
            outputs += llm.chat(
                conversation,
                params.replace(n=2),
                continue_final_message=True,
                add_generation_prompt=False,
                use_tqdm=False,
            )
            answers.append(
                [
                    (one.prompt_token_ids, [(found.token_ids, found.text) for found in one.outputs])
                    for one in outputs
                ]
            )
    assert answers[0] == answers[1]


def test_a_prompt_that_is_too_long_is_cut_where_that_is_asked_for(url):
    with LLM(model="tiny", renderer_url=[url], **OPTIONS) as llm:
        long = "Once upon a time there was a cat. " * 100
        [output] = llm.generate([long], GREEDY.replace(truncate_prompt_tokens=8), use_tqdm=False)
        assert len(output.prompt_token_ids) == 8
        for ask in (
            lambda: llm.generate([long], GREEDY),
            lambda: llm.chat([{"role": "user", "content": long}], GREEDY),
        ):
            with pytest.raises(RequestError, match="maximum context length"):
                ask()


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "empty"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
        ([{"role": 5}], "role"),
    ],
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
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(llm)), base_url="http://server", timeout=120
        )

        async def ask(number: int) -> tuple[int, str]:
            await asyncio.sleep(number * 0.02)
            question = [{"role": "user", "content": f"What is the capital of France? {number}"}]
            answer = await client.post(
                "/v1/chat/completions",
                json={"messages": question, "max_tokens": 8, "temperature": 0},
            )
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
            given = await client.post(
                "/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 4}
            )
            assert given.status_code == 200, "token ids need no renderer"


def test_no_renderer_need_be_there_at_the_start():
    with LLM(model="tiny", renderer_url=["http://127.0.0.1:9"], **OPTIONS) as llm:
        assert (
            llm.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY, use_tqdm=False)[0]
            .outputs[0]
            .text
        )
        with pytest.raises(
            ToolkitError, match="the render server gave no answer; it cannot be reached"
        ) as error:
            llm.generate(["Once"], GREEDY, use_tqdm=False)
        assert not isinstance(error.value, RequestError)


@pytest.mark.parametrize(
    "wrong", ["here", "ftp://host", "http://", "http://user:key@host", "http://host:port"]
)
def test_what_is_no_address_is_refused_at_the_start(wrong):
    with pytest.raises(ConfigError, match="is not the address of a server"):
        LLM(model="tiny", renderer_url=[wrong], **OPTIONS)


def test_the_name_alone_is_not_enough():
    with pytest.raises(ToolkitError, match="give renderer_url"):
        LLM(model="tiny", renderer="remote", **OPTIONS)


class SlowServer:
    """A render server that answers once it is let, and tells who waits and who has left.

    One thread serves all connections: a hundred threads that look around each take so much of
    the interpreter that the engine's event loop does not come to send the other requests.
    """

    def __init__(self) -> None:
        self.left = threading.Semaphore(0)
        self.waiting = 0
        self._loop = asyncio.new_event_loop()
        self._gate = asyncio.Event()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=256)
        )
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._thread = threading.Thread(target=self._loop.run_forever, name="slow", daemon=True)
        self._thread.start()

    def answer(self) -> None:
        """Answer who waits, and from now on everybody at once."""
        self._loop.call_soon_threadsafe(self._gate.set)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            while (body := await self._body(reader)) is not None:
                self.waiting += 1
                answers = asyncio.ensure_future(self._gate.wait())
                leaves = asyncio.ensure_future(reader.read(1))
                await asyncio.wait((answers, leaves), return_when=asyncio.FIRST_COMPLETED)
                self.waiting -= 1
                if not answers.done():
                    answers.cancel()
                    self.left.release()
                    return
                leaves.cancel()
                await asyncio.wait((leaves,))
                writer.write(self._response(body))

    async def _body(self, reader: asyncio.StreamReader) -> dict | None:
        """One request's body, None where the connection ends."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            return json.loads(
                await reader.readexactly(int(re.search(r"content-length: (\d+)", head)[1]))
            )
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def _response(self, body: dict) -> bytes:
        bad = body.get("prompt") == "bad"
        content = json.dumps(
            {"error": {"message": "it is bad.", "param": "prompt"}}
            if bad
            else {"tokens": [5, 6, 7]}
        ).encode()
        status = "400 Bad Request" if bad else "200 OK"
        return (
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        ).encode() + content


@pytest.fixture
def slow() -> Iterator[SlowServer]:
    with closing(SlowServer()) as server:
        yield server
        server.answer()


def num_threads() -> int:
    """Threads of this process, without the slow server's."""
    return sum(one.name != "slow" for one in threading.enumerate())


async def until_waiting(slow: SlowServer, number: int) -> None:
    """Raises AssertionError where other than `number` requests wait at last."""
    for _ in range(1000):
        if slow.waiting == number:
            return
        await asyncio.sleep(0.02)
    assert slow.waiting == number


async def answered(llm: AsyncLLM, prompt: object, **options) -> list[int]:
    async with aclosing(llm.generate(prompt, GREEDY.replace(max_tokens=2), **options)) as outputs:
        return [one.prompt_token_ids async for one in outputs][-1]


@pytest.mark.anyio
async def test_two_hundred_requests_wait_for_a_slow_renderer_without_a_thread_each(slow):
    config = VllmConfig.make(model="tiny", renderer_url=[slow.url], **OPTIONS)
    async with AsyncLLM(config) as llm:
        await answered(llm, {"prompt_token_ids": [5, 6]})
        asked = [asyncio.ensure_future(answered(llm, f"prompt {number}")) for number in range(200)]
        await until_waiting(slow, 128)
        # The event loop's pool has a few threads for work, and all of them are free.
        assert num_threads() < 50
        assert await asyncio.wait_for(answered(llm, {"prompt_token_ids": [8, 9]}), 20) == [8, 9]
        slow.answer()
        assert await asyncio.gather(*asked) == [[5, 6, 7]] * 200


@pytest.mark.anyio
async def test_who_leaves_while_a_prompt_is_rendered_closes_the_connection(slow):
    config = VllmConfig.make(model="tiny", renderer_url=[slow.url], **OPTIONS)
    async with AsyncLLM(config) as llm:
        asked = asyncio.ensure_future(answered(llm, "once"))
        many = asyncio.ensure_future(anext(llm.generate_many(["one", "two"], GREEDY)))
        await until_waiting(slow, 3)
        for one in (asked, many):
            one.cancel()
        await asyncio.gather(asked, many, return_exceptions=True)
        for _ in range(3):
            assert await asyncio.to_thread(slow.left.acquire, timeout=30), (
                "the server has not seen one leave"
            )
        slow.answer()
        assert await answered(llm, "once") == [5, 6, 7]


@pytest.mark.anyio
async def test_errors_are_those_of_a_caller_that_waits(slow):
    slow.answer()
    config = VllmConfig.make(model="tiny", renderer_url=[slow.url], **OPTIONS)
    async with AsyncLLM(config) as llm:

        def waiting(prompts: list[object], **params: object) -> str:
            with pytest.raises(ToolkitError) as told:
                llm.processor.prepare_batch(
                    list(map(str, range(len(prompts)))), prompts, GREEDY.replace(**params)
                )
            return repr(told.value)

        async def awaited(prompts: list[object], **params: object) -> str:
            with pytest.raises(ToolkitError) as told:
                async with aclosing(
                    llm.generate_many(prompts, GREEDY.replace(**params))
                ) as outputs:
                    await anext(outputs)
            return repr(told.value)

        for prompts, params in (
            (["bad"], {}),
            (["good", {"prompt": 5}, "bad"], {}),
            (["\ud800"], {}),
            ([{"prompt_token_ids": [10**6]}], {}),
            (["bad"], {"n": 1000}),
            (["good"], {"extra_args": {"unknown": 1}}),
        ):
            assert await awaited(prompts, **params) == waiting(prompts, **params), prompts
