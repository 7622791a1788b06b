"""Recordings in chats over HTTP, rendered here and by `toolkit render` elsewhere: the tokens and
the answers are equal."""

from __future__ import annotations

import asyncio
import io
import time
from base64 import b64encode
from contextlib import AsyncExitStack
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from audio_checkpoints import RATE, make_subject, recordings
from render_servers import Renderers
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm_renderer_hf.audio_processor import AudioProcessor
from toolkit_lm_server.app import create_app

OPTIONS = {
    "device": "cpu",
    "num_kv_blocks": 200,
    "max_model_len": 192,
    "max_num_seqs": 8,
    "engine_process": False,
}
PATH = "/v1/chat/completions"


def file_of(samples: np.ndarray, kind: str = "WAV", rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind)
    return file.getvalue()


def sound(seconds: float, seed: int = 0, kind: str = "WAV") -> bytes:
    return file_of(recordings(seconds, seed=seed)[0], kind)


def spoken(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": b64encode(data).decode(), **more}}


def part_of(given: Any) -> Any:
    return {"type": "text", "text": given} if isinstance(given, str) else given


def chat(*parts: Any, **body: Any) -> dict[str, Any]:
    """A part is a file, a text, or a content part as it is."""
    content = [spoken(one) if isinstance(one, bytes) else part_of(one) for one in parts]
    asked = {
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": True,
    }
    return {"messages": [{"role": "user", "content": content}], **asked, **body}


def url(data: bytes) -> dict[str, Any]:
    return {
        "type": "audio_url",
        "audio_url": {"url": f"data:audio/flac;base64,{b64encode(data).decode()}"},
    }


CONVERSATIONS = [
    chat("What is said? ", spoken(sound(0.6, 1), format="wav")),
    chat(
        sound(0.6, 1),
        " and ",
        url(sound(0.4, 2, "FLAC")),
        spoken(sound(0.9, 3, "MP3"), format="mp3"),
        " are three.",
    ),
    chat("No sound here, <|AUDIO|> is typed."),
    chat(
        {
            "type": "file",
            "file": {"file_data": b64encode(sound(0.3, 4, "OGG")).decode(), "filename": "a.ogg"},
        }
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_subject(tmp_path_factory.mktemp("audio")).folder)


@pytest.fixture(scope="module")
def renderers():
    made = Renderers()
    yield made
    made.close()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def client_of(
    stack: AsyncExitStack, model: str, **options: Any
) -> tuple[AsyncLLM, httpx.AsyncClient]:
    llm = await stack.enter_async_context(
        AsyncLLM(VllmConfig.make(model=model, **OPTIONS | options))
    )
    transport = httpx.ASGITransport(create_app(llm))
    return llm, await stack.enter_async_context(
        httpx.AsyncClient(transport=transport, base_url="http://server", timeout=120)
    )


def said(answer: httpx.Response) -> tuple[Any, ...]:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    [choice] = body["choices"]
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    return body["prompt_token_ids"], choice["token_ids"], choice["message"]["content"], logprobs


@pytest.mark.anyio
async def test_local_and_remote_renderers_give_the_same(model, renderers):
    there = renderers.start(model, "--max-model-len", "192")
    samples = recordings(0.5, seed=9)[0]
    async with AsyncExitStack() as stack:
        _, local = await client_of(stack, model)
        llm, remote = await client_of(stack, model, renderer_url=[there])
        for _ in range(2):
            for body in CONVERSATIONS:
                first, second = await asyncio.gather(
                    local.post(PATH, json=body), remote.post(PATH, json=body)
                )
                *texts, logprobs = said(first)
                *others, expected = said(second)
                assert texts == others
                assert logprobs == pytest.approx(expected, abs=1e-5)
        for body in (
            chat(sound(0.6, 1), b"no recording"),
            chat(sound(1.5)),
            chat(spoken(sound(0.3), format="mp3")),
        ):
            first, second = await asyncio.gather(
                local.post(PATH, json=body), remote.post(PATH, json=body)
            )
            assert (first.status_code, first.json()) == (second.status_code, second.json())
            assert first.status_code == 400
        # Samples of a caller in this process.
        [message] = [{"role": "user", "content": [{"type": "audio", "audio": (samples, RATE)}]}]
        rendered = await asyncio.to_thread(llm.renderer.render_conversation, [message])
        assert [len(one.data["input_features"].data) for one in rendered.features] == [4 * 16 * 100]


@pytest.mark.anyio
async def test_a_recording_over_http_is_the_one_offline(model):
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(model, **OPTIONS) as llm:
        [output] = llm.chat(CONVERSATIONS[1]["messages"], params, use_tqdm=False)
    async with AsyncExitStack() as stack:
        _, client = await client_of(stack, model)
        prompt, tokens, text, _ = said(await client.post(PATH, json=CONVERSATIONS[1]))
        [found] = output.outputs
        assert (prompt, tokens, text) == (
            output.prompt_token_ids,
            list(found.token_ids),
            found.text,
        )


@pytest.mark.anyio
async def test_a_repeated_recording_is_not_processed_again(model, monkeypatch):
    processed = []
    process = AudioProcessor.process
    monkeypatch.setattr(
        AudioProcessor, "process", lambda *args: (processed.append(1), process(*args))[1]
    )
    async with AsyncExitStack() as stack:
        _, client = await client_of(stack, model, engine_process=True)
        answers = [said(await client.post(PATH, json=CONVERSATIONS[1])) for _ in range(3)]
    assert len(processed) == 3
    assert answers[1][:3] == answers[2][:3] == answers[0][:3]


def lasting(seconds: int) -> bytes:
    """A FLAC whose header says that it lasts so long."""
    data = bytearray(sound(0.3, kind="FLAC"))
    data[21:26] = (0xF0 << 32 | seconds * RATE).to_bytes(5, "big")
    return bytes(data)


BAD = {
    "audio 2: it is not a recording of a known format": chat(sound(0.3), b"no recording"),
    "audio 1: it is empty": chat(b""),
    "audio 1: it has no samples": chat(file_of(np.zeros(0))),
    "audio 1: it is a truncated WAV": chat(sound(0.3)[:-50], sound(0.3)),
    "audio 1: it is a truncated Ogg": chat(sound(0.3, kind="OGG")[:-50]),
    "audio 1: it is a broken or truncated FLAC": chat(sound(0.3, kind="FLAC")[:900]),
    "audio 1: it has 2.00 seconds, and the model hears 1": chat(sound(2.0)),
    "audio 1: it has 36000.00 seconds, more than the 600 that are taken (max_audio_seconds)": chat(
        lasting(36_000)
    ),
    "audio 1: it has 9 channels": chat(file_of(np.zeros((100, 9)))),
    "audio 1: it states 10 samples a second": chat(file_of(np.zeros(100), rate=10)),
    "audio 1: it is said to be of the format MP3": chat(spoken(sound(0.3), format="mp3")),
    "audio 1: it is said to be of the format AAC": chat(spoken(sound(0.3), format="aac")),
    "audio 1: its format is 'midi'": chat(spoken(sound(0.3), format="midi")),
    "audio 1: it is a broken or truncated recording": chat(b"\0\0\0\x18ftypmp42" + bytes(50)),
    "audio 1: input_audio must be": chat({"type": "input_audio", "input_audio": {"format": "wav"}}),
    "audio 1: the host '127.0.0.1:9' is not allowed": chat(
        {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:9/a.wav"}}
    ),
    "audio 1: it is none of a data URL": chat(
        {"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}
    ),
    "audio 17: there are 17": chat(*[sound(0.1)] * 17),
    "audio 1: embeds must be floats": chat(
        {
            "type": "audio_embeds",
            "audio_embeds": {"dtype": "float32", "shape": [1, 1], "data": "AAAAAA=="},
        }
    ),
    "image 1: this model takes no image, only audio": chat(
        {"type": "image_url", "image_url": {"url": "data:;base64,YQ=="}}
    ),
    "mm_processor_kwargs: 'sampling_rate' cannot be set": chat(
        sound(0.3), mm_processor_kwargs={"sampling_rate": 8000}
    ),
}


@pytest.mark.anyio
async def test_a_bad_item_is_one_clear_error_and_the_request_beside_it_goes_on(model):
    async with AsyncExitStack() as stack:
        _, client = await client_of(stack, model)
        said(await client.post(PATH, json=CONVERSATIONS[0]))
        start = time.perf_counter()
        answers = await asyncio.gather(
            *(client.post(PATH, json=body) for body in [*BAD.values(), CONVERSATIONS[0]])
        )
        assert time.perf_counter() - start < 10
        for told, answer in zip(BAD, answers, strict=False):
            assert answer.status_code == 400, (told, answer.text)
            error = answer.json()["error"]
            assert told in error["message"], error["message"]
            assert error["param"] in ("messages", "mm_processor_kwargs", "multi_modal_data")
        said(answers[-1])


@pytest.mark.anyio
async def test_the_operators_bound_of_seconds(model):
    async with AsyncExitStack() as stack:
        _, client = await client_of(stack, model, max_audio_seconds=0.5)
        answer = await client.post(PATH, json=chat(sound(0.6)))
        assert answer.status_code == 400
        assert (
            "audio 1: it has 0.60 seconds, more than the 0.5 that are taken (max_audio_seconds)"
            in answer.json()["error"]["message"]
        )
        said(await client.post(PATH, json=chat(sound(0.4))))


@pytest.mark.anyio
async def test_responses_take_recordings(model):
    """Responses take recordings like chats: the prompt is the same."""
    async with AsyncExitStack() as stack:
        _, client = await client_of(stack, model)
        part = spoken(sound(0.6, 1), format="wav")
        content = [{"type": "input_text", "text": "What is said? "}, part]
        asked = {
            "max_output_tokens": 8,
            "temperature": 0,
            "input": [{"role": "user", "content": content}],
        }
        answer = await client.post("/v1/responses", json=asked)
        assert answer.status_code == 200, answer.text
        prompt, *_ = said(await client.post(PATH, json=CONVERSATIONS[0]))
        assert answer.json()["usage"]["input_tokens"] == len(prompt)
        asked["input"][0]["content"][1] = spoken(b"no recording", format="wav")
        refused = await client.post("/v1/responses", json=asked)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(
            "audio 1: it is not a recording of a known format"
        )
