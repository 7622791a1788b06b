"""A third party's renderer (tests/plugins/letters): text and pictures, by public names only."""

from __future__ import annotations

import importlib
import sys
from base64 import b64encode
from pathlib import Path

import httpx
import pytest
from budgets import count_tokens
from toolkit_lm import LLM, SamplingParams, VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit.cli.private_names import private_names
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.rendering import Rendering, create_render_app

HERE = Path(__file__).parent
FOLDER = HERE / "plugins" / "letters"
for folder in (FOLDER, HERE.parent / "contrib_models" / "vision" / "tests"):
    sys.path.insert(0, str(folder))
LETTERS = importlib.import_module("letters_renderer")
OPTIONS = {
    "renderer": "letters",
    "device": "cpu",
    "num_kv_blocks": 64,
    "max_model_len": 128,
    "max_num_seqs": 4,
}
PARAMS = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)


def picture(shade: int, size: int = 28) -> bytes:
    return b"P6 %d %d 255\n" % (size, size) + bytes([shade, 255 - shade, shade // 2]) * size * size


def question(*files: bytes) -> list[dict]:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:;base64,{b64encode(file).decode()}"}}
        for file in files
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "hi"}]}]


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> str:
    make = importlib.import_module("vision_checkpoints").make_subject
    return str(make(tmp_path_factory.mktemp("llava"), "llava").folder)


def test_it_is_small_and_uses_public_names():
    file = FOLDER / "letters_renderer.py"
    assert count_tokens(file.read_text()) < 700
    assert private_names(file) == []


def test_text():
    with LLM("tiny", plugins=[LETTERS], **OPTIONS) as llm:
        [output] = llm.generate(["Once"], PARAMS, use_tqdm=False)
        [chat] = llm.chat([{"role": "user", "content": "Once"}], PARAMS, use_tqdm=False)
        assert output.prompt_token_ids == chat.prompt_token_ids == [30 + byte for byte in b"Once"]
        with pytest.raises(RequestError, match="empty"):
            llm.generate([""], PARAMS, use_tqdm=False)


def test_pictures(llava):
    with LLM(llava, plugins=[LETTERS], **OPTIONS) as llm:

        def ask(*files: bytes) -> tuple[list[int], list[float]]:
            [output] = llm.chat(question(*files), PARAMS, use_tqdm=False)
            [found] = output.outputs
            return output.prompt_token_ids, [
                next(iter(one.values())).logprob for one in found.logprobs
            ]

        dark = picture(10)
        light = picture(200)
        prompt, first = ask(dark, light)
        assert prompt == [*[7] * 32, 30 + ord("h"), 30 + ord("i")]
        other_prompt, other = ask(light, dark)
        assert other_prompt == prompt, "equal placeholders"
        assert other != first, "and other pictures: they share no keys and values"
        assert ask(dark, light)[1] == pytest.approx(first, abs=1e-5)
        with pytest.raises(RequestError, match="image 2: it is no netpbm file"):
            ask(dark, b"P6 28 28 255\n")
        with pytest.raises(RequestError, match="must have the shape"):
            ask(picture(10, size=14))
        assert ask(dark, light)[1] == pytest.approx(first, abs=1e-5)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_toolkit_render_serves_it(llava, anyio_backend):
    config = VllmConfig.make(model=llava, renderer="letters", max_model_len=128)
    made = Rendering(config, Plugins.load(config.plugins, [LETTERS]))
    app = create_render_app(made, ServerOptions(), metrics=Metrics(), readiness=Readiness(made))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://server"
    ) as client:
        answer = await client.post(
            "/v1/chat/completions/render", json={"messages": question(picture(10))}
        )
        [feature] = answer.json()["features"]
        assert feature["mm_position"] == {"offset": 0, "length": 16, "mask": None}
        assert feature["data"]["pixel_values"]["shape"] == [1, 3, 28, 28]
        wrong = await client.post("/v1/chat/completions/render", json={"messages": question(b"")})
        assert (wrong.status_code, wrong.json()["error"]["message"]) == (
            400,
            "image 1: it is no netpbm file.",
        )
