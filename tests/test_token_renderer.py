"""`--renderer tokens`: token ids in, token ids out, of a checkpoint without a tokenizer; offline
and over HTTP."""

from __future__ import annotations

import json
import shutil

import httpx
import pytest
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.errors import RequestError, UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm_server.app import create_app

OPTIONS = {"device": "cpu", "num_kv_blocks": 64, "max_model_len": 64, "max_num_seqs": 4}
PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare")
    for path in Plugins.load().checkpoints.path("tiny").iterdir():
        if path.name in ("config.json", "generation_config.json") or path.suffix == ".safetensors":
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def expected():
    with LLM("tiny", **OPTIONS) as llm:
        return (
            llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)[0]
            .outputs[0]
            .token_ids
        )


def test_tokens_in_and_tokens_out(folder, expected):
    with LLM(str(folder), renderer="tokens", **OPTIONS) as llm:
        [output] = llm.generate(
            [{"prompt_token_ids": PROMPT}], GREEDY.replace(logprobs=1), use_tqdm=False
        )
        [found] = output.outputs
        assert (found.token_ids, found.text, output.prompt_token_ids) == (expected, "", PROMPT)
        assert found.logprobs[0][expected[0]].decoded_token == f"token_id:{expected[0]}"
        [stopped] = llm.generate(
            [{"prompt_token_ids": PROMPT}],
            GREEDY.replace(stop_token_ids=[expected[2]]),
            use_tqdm=False,
        )
        assert stopped.outputs[0].token_ids == expected[: expected.index(expected[2]) + 1]
        for prompt in ("Once", {"prompt": "Once"}):
            with pytest.raises(
                RequestError,
                match=r"takes token ids, and no text \(renderer='tokens'\): give prompt_token_ids",
            ):
                llm.generate([prompt], GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match="takes token ids, and no text"):
            llm.chat([{"role": "user", "content": "Once"}], GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match=r"stop is a text, .*: use stop_token_ids"):
            llm.generate([{"prompt_token_ids": PROMPT}], GREEDY.replace(stop=["a"]), use_tqdm=False)
        with pytest.raises(RequestError, match="empty"):
            llm.generate([{"prompt_token_ids": []}], GREEDY, use_tqdm=False)


def test_it_is_taken_by_its_name_only(folder):
    with pytest.raises(
        UnsupportedError,
        match=r"hf: .* has none of tokenizer.json, .*; tokens: only renderer='tokens' takes it",
    ):
        LLM(str(folder), **OPTIONS)


def client(llm):
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(llm)), base_url="http://test")


@pytest.mark.anyio
async def test_token_ids_over_http(folder, expected):
    """Token ids of any renderer: `return_token_ids`."""
    asked = {"temperature": 0, "max_tokens": 6, "return_token_ids": True}
    async with (
        AsyncLLM(VllmConfig.make(model=str(folder), renderer="tokens", **OPTIONS)) as llm,
        client(llm) as http,
    ):
        answer = (
            await http.post("/v1/completions", json={"prompt": PROMPT, "n": 2, **asked})
        ).json()
        assert [
            (one["token_ids"], one["prompt_token_ids"], one["text"]) for one in answer["choices"]
        ] == [(expected, PROMPT, "")] * 2
        assert answer["usage"]["completion_tokens"] == 12
        streamed = await http.post(
            "/v1/completions", json={"prompt": PROMPT, "stream": True, **asked}
        )
        chunks = [
            json.loads(line[6:])["choices"][0]
            for line in streamed.text.splitlines()
            if line.startswith("data: {")
        ]
        assert [token for one in chunks for token in one["token_ids"]] == expected
        assert [one["prompt_token_ids"] for one in chunks if "prompt_token_ids" in one] == [PROMPT]
        refused = await http.post("/v1/completions", json={"prompt": "Once", **asked})
        assert (refused.status_code, "takes token ids" in refused.text) == (400, True)
        chat = await http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Once"}]}
        )
        assert (chat.status_code, "takes token ids" in chat.text) == (400, True)
    async with AsyncLLM(VllmConfig.make(model="tiny", **OPTIONS)) as llm, client(llm) as http:
        body = {"messages": [{"role": "user", "content": "Once"}], **asked}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        prompt = answer["prompt_token_ids"]
        found = answer["choices"][0]["token_ids"]
        assert (
            llm.renderer.decode(found, skip_special_tokens=True)
            == answer["choices"][0]["message"]["content"]
        )
        assert len(prompt) == answer["usage"]["prompt_tokens"]
        streamed = await http.post("/v1/chat/completions", json={**body, "stream": True})
        chunks = [
            json.loads(line[6:])
            for line in streamed.text.splitlines()
            if line.startswith("data: {")
        ]
        assert [
            token for one in chunks for token in one["choices"][0].get("token_ids") or []
        ] == found
        assert [one["prompt_token_ids"] for one in chunks if "prompt_token_ids" in one] == [prompt]
