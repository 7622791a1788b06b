"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
import io
import json

import httpx
import numpy as np
import pytest
import soundfile
from sounds import recorded
from toolkit_lm import LLM, AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_whisper.formats import FORMATS
from toolkit_lm_whisper.transcriber import Transcriber

PATH = "/v1/audio/transcriptions"
OPTIONS = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 600, "max_num_seqs": 4}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def samples(seconds: float) -> np.ndarray:
    time = np.arange(int(16000 * seconds)) / 16000
    return (0.4 * np.sin(2 * np.pi * (200 + 20 * time) * time)).astype(np.float32)


def wav(seconds: float = 2) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples(seconds), 16000, format="WAV", subtype="FLOAT")
    return file.getvalue()


def client(llm: AsyncLLM, options: ServerOptions | None = None) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(llm, options)), base_url="http://test", timeout=60
    )


def upload(data: bytes, name: str = "speech.wav"):
    return {"file": (name, data, "audio/wav")}


@pytest.mark.anyio
async def test_formats_and_streams_are_those_of_the_transcriber(folder):
    with LLM(str(folder), **OPTIONS) as offline:
        transcriber = Transcriber(offline)
        [expected] = transcriber.transcribe([(samples(40), 16000)], language="en", prompt="A name.")
        [english] = transcriber.transcribe([(samples(40), 16000)], task="translate")
    config = VllmConfig.make(model=str(folder), **OPTIONS)
    async with AsyncLLM(config) as llm, client(llm) as http:
        fields = {"model": llm.served_model_name, "language": "en", "prompt": "A name."}

        async def ask(path: str = PATH, **more):
            answer = await http.post(
                path, data=more if path != PATH else {**fields, **more}, files=upload(wav(40))
            )
            assert answer.status_code == 200, answer.text
            return answer

        described = (await http.get("/openapi.json")).json()["paths"][PATH]["post"]
        assert set(described["requestBody"]["content"]) == {"multipart/form-data"}
        assert {"application/json", "text/plain", "text/event-stream"} <= set(
            described["responses"]["200"]["content"]
        )
        for container, codec in (("ipod", "aac"), ("webm", "libopus")):
            sent = await http.post(
                PATH,
                data=fields,
                files=upload(recorded(container, codec, 48000, 3.0), f"talk.{container}"),
            )
            # The frames of AAC are longer than what was said, and seconds count when they have
            # begun.
            assert sent.status_code == 200 and sent.json()["usage"]["seconds"] in (3, 4), sent.text
        plain = (await ask()).json()
        assert plain == {"text": expected.text, "usage": {"type": "duration", "seconds": 40}}
        for name, ours in (("text", "txt"), ("srt", "srt"), ("vtt", "vtt")):
            answer = await ask(response_format=name)
            assert answer.text == FORMATS[ours](expected)
            assert answer.headers["content-type"].startswith("text/plain")
        whole = (
            await ask(response_format="verbose_json", **{"timestamp_granularities[]": "segment"})
        ).json()
        assert [one["tokens"] for one in whole["segments"]] == [
            one.token_ids for one in expected.segments
        ]
        assert all(
            0 <= one["no_speech_prob"] <= 1 and one["compression_ratio"] > 0
            for one in whole["segments"]
        )
        assert (whole["task"], whole["language"], whole["duration"]) == ("transcribe", "en", 40)
        lines = [line[6:] for line in (await ask(stream="true")).text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        *deltas, done = map(json.loads, lines)
        assert {one["type"] for one in deltas} == {"transcript.text.delta"}
        assert "".join(one["delta"] for one in deltas).strip() == done["text"] == expected.text
        assert done["type"] == "transcript.text.done"
        assert (await ask("/v1/audio/translations")).json()["text"] == english.text
        several = await asyncio.gather(*(ask() for _ in range(3)))
        assert [one.json() for one in several] == [plain] * 3


@pytest.mark.anyio
async def test_bad_requests_are_told_what_is_wrong(folder):
    config = VllmConfig.make(model=str(folder), **OPTIONS)
    empty = io.BytesIO()
    soundfile.write(empty, np.zeros(0), 16000, format="WAV")
    cases = [
        ({}, {}, 400, "You must provide the parameter 'file'"),
        ({}, upload(b"no sound"), 400, "'speech.wav': it is not a recording of a known format"),
        ({}, upload(empty.getvalue()), 400, "'speech.wav': it has no samples"),
        ({"model": "other"}, upload(wav()), 404, "The model 'other' does not exist"),
        ({"language": "xx"}, upload(wav()), 400, "language 'xx' is not one of the model's"),
        ({"response_format": "pdf"}, upload(wav()), 400, "Invalid value for 'response_format'"),
        ({"temperature": "hot"}, upload(wav()), 400, "Invalid value for 'temperature'"),
        (
            {"temprature": "0"},
            upload(wav()),
            400,
            "Unrecognized request argument supplied: temprature. Did you mean 'temperature'",
        ),
        (
            {"keywords": "name"},
            upload(wav()),
            400,
            "keywords is not supported by this server: write the words into prompt.",
        ),
        (
            {"known_speaker_names[]": "a"},
            upload(wav()),
            400,
            "known_speaker_names[] is not supported",
        ),
        ({"timestamp_granularities[]": "word"}, upload(wav()), 400, "timestamp_granularities[]"),
        (
            {"stream": "true", "response_format": "srt"},
            upload(wav()),
            400,
            "'srt' cannot be streamed",
        ),
        ({"file": "no upload"}, {}, 400, "Invalid value for 'file'"),
    ]
    async with AsyncLLM(config) as llm, client(llm, ServerOptions(strict_fields=True)) as http:
        for data, files, status, told in cases:
            answer = await http.post(PATH, data=data, files=files)
            assert (answer.status_code, told in answer.text) == (status, True), (data, answer.text)
        assert (await http.post(PATH, json={"file": "x"})).status_code == 400
        assert (
            await http.post("/v1/audio/translations", data={"language": "en"}, files=upload(wav()))
        ).status_code == 400
        good = await http.post(PATH, files=upload(wav()))
        assert good.status_code == 200
    async with (
        AsyncLLM(config) as llm,
        client(llm, ServerOptions(max_request_cost="1MiB", max_body_size="1MiB")) as http,
    ):
        answer = await http.post(PATH, files=upload(wav(10)))
        assert (answer.status_code, "most of it for seconds of audio" in answer.text) == (400, True)
        answer = await http.post(PATH, files=upload(wav(30)))
        assert (answer.status_code, "max_body_size" in answer.text) == (413, True)
        assert (await http.post(PATH, files=upload(wav(1)))).status_code == 200


@pytest.mark.anyio
async def test_routes_are_there_for_the_model_that_they_are_of():
    async with (
        AsyncLLM(VllmConfig.make(model="tiny", num_kv_blocks=32, max_model_len=64)) as llm,
        client(llm) as http,
    ):
        assert (await http.post(PATH, files=upload(wav()))).status_code == 404


@pytest.mark.anyio
async def test_a_model_without_timestamps_says_so(folder, tmp_path):
    for one in folder.iterdir():
        (tmp_path / one.name).write_bytes(one.read_bytes())
    generation = json.loads((folder / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(
        json.dumps({k: v for k, v in generation.items() if "timestamps" not in k})
    )
    async with (
        AsyncLLM(VllmConfig.make(model=str(tmp_path), **OPTIONS)) as llm,
        client(llm) as http,
    ):
        answer = await http.post(PATH, files=upload(wav()))
        assert (answer.status_code, "names its timestamps" in answer.text) == (400, True)
