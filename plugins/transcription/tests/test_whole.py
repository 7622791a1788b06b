"""Transcripts of models that hear a recording whole: those of transformers, by the routes and by
the command; and what they cannot obey."""

from __future__ import annotations

import io
import json

import audio
import httpx
import numpy as np
import pytest
import soundfile
import torch
from tiny_models import save
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_cli import run
from toolkit_lm_server.app import create_app
from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2Processor

PATH = "/v1/audio/transcriptions"
LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJ"]
OPTIONS = {"dtype": "float32", "num_kv_blocks": 300}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def wav2vec2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wav2vec2")
    config = audio.tiny_config("wav2vec2")
    config.pad_token_id = 0
    config.vocab_size = len(LETTERS)
    model = save("wav2vec2", folder, architecture="Wav2Vec2ForCTC", config=config)
    audio.vary(model)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "letters.json").write_text(json.dumps({c: i for i, c in enumerate(LETTERS)}))
    tokenizer = Wav2Vec2CTCTokenizer(str(folder / "letters.json"))
    processor = Wav2Vec2Processor(Wav2Vec2FeatureExtractor(), tokenizer)
    processor.save_pretrained(folder)
    return model, processor, folder


def samples(count=6000) -> np.ndarray:
    time = np.arange(count) / 16000
    return (0.4 * np.sin(2 * np.pi * (200 + 900 * time) * time)).astype(np.float32)


def wav(count=6000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples(count), 16000, format="WAV", subtype="FLOAT")
    return file.getvalue()


@torch.inference_mode()
def reference(model, processor) -> str:
    made = processor(samples(), sampling_rate=16000, return_tensors="pt")
    return processor.batch_decode(model(**made).logits.argmax(dim=-1))[0]


@pytest.mark.anyio
async def test_routes_give_the_text_of_transformers(wav2vec2):
    model, processor, folder = wav2vec2
    expected = reference(model, processor)
    assert len(expected) > 5
    config = VllmConfig.make(model=str(folder), **OPTIONS)
    transport = httpx.ASGITransport
    async with (
        AsyncLLM(config) as llm,
        httpx.AsyncClient(transport=transport(create_app(llm)), base_url="http://test") as http,
    ):

        async def ask(path=PATH, count=6000, **fields):
            return await http.post(path, data=fields, files={"file": ("a.wav", wav(count))})

        plain = (await ask()).json()
        assert plain == {"text": expected, "usage": {"type": "duration", "seconds": 1}}
        (segment,) = (await ask(response_format="verbose_json")).json()["segments"]
        assert (segment["start"], segment["end"], segment["text"]) == (0.0, 0.38, expected)
        assert segment["avg_logprob"] is None and segment["no_speech_prob"] is None
        assert "00:00:00,000 --> 00:00:00,375" in (await ask(response_format="srt")).text
        lines = [line[6:] for line in (await ask(stream="true")).text.splitlines() if line]
        assert [json.loads(line).get("delta") for line in lines[:-1]] == [expected, None]
        for fields, told in (
            ({"language": "en"}, "takes no language"),
            ({"prompt": "Names"}, "takes no prompt"),
            ({"temperature": "0.5"}, "there is no temperature"),
            ({"count": 12}, "may be too short"),
            ({"count": 90000}, "max_encoder_len is 1024"),
            ({"path": "/v1/audio/translations"}, "no task 'translate'"),
        ):
            answer = await ask(**fields)
            assert (answer.status_code, told in answer.text) == (400, True), answer.text
        assert (await ask()).json() == plain


def test_the_command(wav2vec2, tmp_path, capsys):
    model, processor, folder = wav2vec2
    path = tmp_path / "talk.wav"
    path.write_bytes(wav())
    flags = ["--dtype", "float32", "--num-kv-blocks", "300"]
    assert run(["transcribe", str(folder), str(path), *flags]) == 0
    assert capsys.readouterr().out == reference(model, processor) + "\n"
    assert run(["transcribe", str(folder), str(path), "--language", "en", *flags]) != 0
    assert "takes no language" in capsys.readouterr().err
