"""Pictures in chats over HTTP, rendered here and by `toolkit render` elsewhere: the tokens and the
answers are equal."""

from __future__ import annotations

import asyncio
import importlib
import io
import sys
from base64 import b64encode
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from render_servers import Renderers
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm_renderer_remote.conformance import RenderServerConformance
from toolkit_lm_server.app import create_app

sys.path.insert(0, str(Path(__file__).parents[1] / "contrib_models" / "vision" / "tests"))
OPTIONS = {
    "device": "cpu",
    "num_kv_blocks": 200,
    "max_model_len": 192,
    "max_num_seqs": 8,
    "engine_process": False,
}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% "
    "else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% "
    "endif %}\n{% endfor %}assistant:"
)
PATH = "/v1/chat/completions"


def png(seed: int, kind: str = "PNG") -> bytes:
    random = np.random.default_rng(seed)
    file = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (*random.integers(12, 90, 2), 3), np.uint8)).save(
        file, kind
    )
    return file.getvalue()


def url(data: bytes) -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{b64encode(data).decode()}"},
    }


def part_of(given: Any) -> Any:
    return {"type": "text", "text": given} if isinstance(given, str) else given


def chat(*parts: Any, **body: Any) -> dict[str, Any]:
    """A part is a file, a text, or a content part as it is."""
    content = [url(one) if isinstance(one, bytes) else part_of(one) for one in parts]
    asked = {
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": True,
    }
    return {"messages": [{"role": "user", "content": content}], **asked, **body}


CONVERSATIONS = [
    chat("What is it? ", png(1)),
    chat(png(1), " and ", png(2, "JPEG"), png(1), " are three."),
    chat("No picture here, <image> is typed."),
]


@pytest.fixture(scope="module", params=["llava", pytest.param("gemma3", marks=pytest.mark.nightly)])
def model(request, tmp_path_factory):
    subject = importlib.import_module("vision_checkpoints").make_subject(
        tmp_path_factory.mktemp("vision"), request.param
    )
    template = (
        TEMPLATE if request.param == "llava" else TEMPLATE.replace("<image>", "<start_of_image>")
    )
    (subject.folder / "chat_template.jinja").write_text(template)
    return str(subject.folder)


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


def assert_alike(first: httpx.Response, second: httpx.Response) -> None:
    *texts, logprobs = said(first)
    *others, expected = said(second)
    assert texts == others
    assert logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.anyio
async def test_local_and_remote_renderers_give_the_same(model, renderers, monkeypatch):
    urls = [renderers.start(model, "--max-model-len", "192") for _ in range(2)]
    async with AsyncExitStack() as stack:
        _, local = await client_of(stack, model)
        llm, remote = await client_of(stack, model, renderer_url=urls)
        came = []
        checked = llm.renderer._checked
        monkeypatch.setattr(
            llm.renderer, "_checked", lambda found: came.append(found.features) or checked(found)
        )
        for _ in range(2):
            for body in CONVERSATIONS:
                first, second = await asyncio.gather(
                    local.post(PATH, json=body), remote.post(PATH, json=body)
                )
                assert_alike(first, second)
        with_data = [[feature.data is not None for feature in features or ()] for features in came]
        # The first picture is held when the second conversation brings it; all are the second time,
        # whichever server is asked.
        assert with_data == [[True], [False, True, False], [], [False], [False] * 3, []]
        # One renderer dies while requests are under way.
        asked = asyncio.gather(*(remote.post(PATH, json=chat(png(i), f" {i}")) for i in range(24)))
        await asyncio.sleep(0.3)
        renderers.kill(urls[0])
        answers = await asked
        assert [answer.status_code for answer in answers] == [200] * 24
        expected = await local.post(PATH, json=chat(png(5), " 5"))
        assert_alike(answers[5], expected)
        # Faults are reported in the same words.
        wrong = [
            chat(png(1), b"no picture"),
            chat({"type": "image_url"}),
            chat({"type": "video", "video": "data:;base64,YQ=="}),
        ]
        for body in [*wrong, chat(png(3), mm_processor_kwargs={"do_normalize": False})]:
            first, second = await asyncio.gather(
                local.post(PATH, json=body), remote.post(PATH, json=body)
            )
            assert (first.status_code, first.json()) == (second.status_code, second.json())
            assert first.status_code == 400


@pytest.mark.anyio
async def test_a_picture_over_http_is_the_one_offline(model):
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(model, **OPTIONS) as llm:
        [output] = llm.chat(CONVERSATIONS[0]["messages"], params, use_tqdm=False)
    async with AsyncExitStack() as stack:
        _, client = await client_of(stack, model)
        prompt, tokens, text, _ = said(await client.post(PATH, json=CONVERSATIONS[0]))
        [found] = output.outputs
        assert (prompt, tokens, text) == (
            output.prompt_token_ids,
            list(found.token_ids),
            found.text,
        )


@pytest.mark.anyio
async def test_a_bad_item_is_one_clear_error_and_the_request_beside_it_goes_on(model):
    big = (
        b"\x89PNG\r\n\x1a\n"
        + b"\0\0\0\rIHDR"
        + (50_000).to_bytes(4, "big") * 2
        + b"\x08\x02\0\0\0"
        + bytes(4)
    )
    bad = {
        "image 2": chat(png(1), b"no picture"),
        "image 1": chat(png(1)[:60]),
        "pixels": chat(big),
        "is not allowed|allowed": chat(
            {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}
        ),
        "data URL": chat({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
        "limit_mm_per_prompt": chat(*[png(1)] * 17),
        "takes no audio": chat(
            {"type": "input_audio", "input_audio": {"data": "YQ==", "format": "wav"}}
        ),
        "has 1 bytes": chat(
            {
                "type": "image_embeds",
                "image_embeds": {"dtype": "float32", "shape": [3, 5], "data": "YQ=="},
            }
        ),
    }
    async with AsyncExitStack() as stack:
        _, client = await client_of(stack, model)
        answers = await asyncio.gather(
            *(client.post(PATH, json=body) for body in [*bad.values(), CONVERSATIONS[0]])
        )
        for told, answer in zip(bad, answers, strict=False):
            assert answer.status_code == 400, (told, answer.text)
            error = answer.json()["error"]
            assert error["param"] == "messages"
            assert any(one in error["message"] for one in told.split("|")), error["message"]
        said(answers[-1])


class TestToolkitRender(RenderServerConformance):
    """It passes the tests of render servers with pictures, too."""

    images = (png(1), png(2, "JPEG"))
    speaks_msgpack = True

    @pytest.fixture(scope="class")
    @staticmethod
    def url(tmp_path_factory, renderers) -> str:
        folder = (
            importlib.import_module("vision_checkpoints")
            .make_subject(tmp_path_factory.mktemp("rendered"), "llava")
            .folder
        )
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        return renderers.start(str(folder))
