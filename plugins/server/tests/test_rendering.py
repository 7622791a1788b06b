"""`toolkit render`: a renderer over HTTP, and what an engine elsewhere makes of its tokens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import httpx
import pytest
from toolkit_lm import LLM, SamplingParams, VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.rendering import Rendering, create_render_app

pytestmark = pytest.mark.anyio
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
RENDER_CHAT = "/v1/chat/completions/render"
RENDER = "/v1/completions/render"


def rendering(**options) -> Rendering:
    config = VllmConfig.make(**{"model": "tiny"} | options)
    return Rendering(config, Plugins.load(config.plugins))


def render_client(made: Rendering, **options) -> httpx.AsyncClient:
    app = create_render_app(
        made, ServerOptions(**options), metrics=Metrics(), readiness=Readiness(made)
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


async def test_an_engine_without_a_tokenizer_makes_of_it_what_one_with_it_does():
    params = SamplingParams(max_tokens=12, temperature=0)
    with LLM(model="tiny") as llm:
        [chat] = llm.chat(CHAT, params)
        [text] = llm.generate("Once upon a time", params)
    with LLM(model="tiny", renderer="tokens") as llm:
        async with render_client(rendering()) as client:
            rendered = (await client.post(RENDER_CHAT, json={"messages": CHAT})).json()["token_ids"]
            [prompt] = (await client.post(RENDER, json={"prompt": "Once upon a time"})).json()[
                "data"
            ]
            assert (rendered, prompt["token_ids"]) == (chat.prompt_token_ids, text.prompt_token_ids)
            outputs = llm.generate(
                [{"prompt_token_ids": ids} for ids in (rendered, prompt["token_ids"])], params
            )
            for output, expected in zip(outputs, (chat, text), strict=True):
                asked = {
                    "token_ids": list(output.outputs[0].token_ids),
                    "prompt_token_ids": output.prompt_token_ids,
                }
                assert output.outputs[0].text == ""
                assert (await client.post("/derender", json=asked)).json() == {
                    "text": expected.outputs[0].text
                }


async def test_sampling_parameters_come_back_as_they_differ_from_their_defaults():
    async with render_client(rendering()) as client:
        body = {
            "messages": CHAT,
            "max_completion_tokens": 8,
            "temperature": 0.5,
            "top_p": 1.0,
            "stop": ["x"],
            "stream": True,
        }
        answer = (await client.post(RENDER_CHAT, json=body)).json()
        assert answer["sampling_params"] == {"max_tokens": 8, "temperature": 0.5, "stop": ["x"]}
        assert (answer["model"], answer["max_model_len"]) == ("tiny", 512)


async def test_prompts_are_cut_where_that_is_asked_for():
    async with render_client(rendering()) as client:
        [whole] = (await client.post(RENDER, json={"prompt": "Once upon a time"})).json()["data"]
        [cut] = (
            await client.post(
                RENDER, json={"prompt": "Once upon a time", "truncate_prompt_tokens": 2}
            )
        ).json()["data"]
        assert cut["token_ids"] == whole["token_ids"][-2:]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "told"),
    [
        (RENDER_CHAT, {"messages": []}, 400, "messages", "empty"),
        (RENDER_CHAT, {"messages": CHAT, "temperature": -1}, 400, "temperature", "between"),
        (RENDER_CHAT, {"messages": CHAT, "model": "other"}, 404, "model", "does not exist"),
        (RENDER_CHAT, {"messages": CHAT, "n": 10_000}, 400, "n", "max_n"),
        (RENDER, {"prompt": [5, 999_999]}, 400, "prompt", "not in the vocabulary"),
        (RENDER, {"prompt": ["a", ""]}, 400, "prompt", "empty"),
        (RENDER, {"prompt": [5] * 16}, 400, "prompt", "maximum context length"),
        (RENDER, {"encoder_prompt": "a"}, 400, "prompt", "encoder-decoder"),
        ("/derender", {"token_ids": [-1]}, 400, "token_ids", "not in the vocabulary"),
        (
            "/derender",
            {"token_ids": [5], "prompt_token_ids": [10**30]},
            400,
            "prompt_token_ids",
            "not in the vocabulary",
        ),
        ("/tokenize", {}, 400, "prompt", "Give either"),
        ("/v1/completions", {"prompt": "a"}, 404, None, "Not Found"),
    ],
)
async def test_bad_input(path, body, status, param, told):
    async with render_client(rendering(max_model_len=16)) as client:
        answer = await client.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param)
        assert told in error["message"]
        # The next request is served.
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 200


async def test_a_key_is_asked_for():
    async with render_client(rendering(), api_key="secret") as client:
        assert (await client.post(RENDER, json={"prompt": "a"})).status_code == 401
        answer = await client.post(
            RENDER, json={"prompt": "a"}, headers={"authorization": "Bearer secret"}
        )
        assert answer.status_code == 200
        assert (await client.get("/health")).json() == {"status": "ready"}


def test_encoder_decoder_models_are_refused():
    with pytest.raises(UnsupportedError, match="toolkit serve"):
        rendering(model="tiny-dates")


def test_the_command_needs_no_torch():
    code = (
        "import sys; from toolkit_lm_cli import main; sys.argv = ['toolkit', 'render', 'tiny', "
        "'--port', '0']\n"
        "import atexit; atexit.register(lambda: print('heavy:', sorted({'torch', 'transformers'} "
        "& set(sys.modules)), flush=True))\n"
        "main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        url = re.search(r"http://\S+", server.stdout.readline())
        assert url is not None
        answer = httpx.post(f"{url[0]}{RENDER_CHAT}", json={"messages": CHAT}, timeout=30)
        assert answer.json()["token_ids"]
        os.kill(server.pid, signal.SIGTERM)
        assert server.stdout.read().splitlines()[-1] == "heavy: []"
        assert server.wait(30) == 0
