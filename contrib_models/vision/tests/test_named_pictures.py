"""Pictures that are given once with a uuid, and later by it alone: offline and over HTTP."""

from __future__ import annotations

import base64
import io

import httpx
import pytest
from PIL import Image
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio
OPTIONS = {
    "model": "tiny-vision",
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 256,
    "num_kv_blocks": 64,
    "max_num_seqs": 2,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8)
QUESTION = {"type": "text", "text": "What colour is the circle?"}
UNKNOWN = "image 1: no item of uuid 'mine' is in the cache of media"
CHAT = "/v1/chat/completions"


@pytest.fixture
def anyio_backend():
    return "asyncio"


def drawing(colour: str = "red") -> Image.Image:
    return Image.new("RGB", (48, 48), colour)


def part_of(picture, **more):
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}, **more}


def alone(uuid="mine"):
    return {"type": "image_url", "image_url": None, "uuid": uuid}


def asking(*parts):
    return [{"role": "user", "content": [*parts, QUESTION]}]


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_offline():
    with LLM(**OPTIONS) as llm:
        with pytest.raises(RequestError, match=UNKNOWN):
            llm.chat(asking(alone()), GREEDY)
        whole = tokens(llm.chat(asking(part_of(drawing(), uuid="mine")), GREEDY))
        assert tokens(llm.chat(asking(alone()), GREEDY)) == whole
        other = tokens(llm.chat(asking(part_of(drawing("blue"), uuid="theirs")), GREEDY))
        both = tokens(llm.chat([asking(alone("theirs")), asking(alone())], GREEDY))
        assert both == [*other, *whole]
        given = {"prompt": "<image> What?", "multi_modal_data": {"image": drawing()}}
        named = {"multi_modal_uuids": {"image": ["again"]}}
        first = tokens(llm.generate({**given, **named}, GREEDY))
        rest = {"prompt": "<image> What?", **named}
        for data in ({}, {"multi_modal_data": {"image": [None]}}):
            assert tokens(llm.generate({**rest, **data}, GREEDY)) == first
        with pytest.raises(RequestError, match="no item of uuid 'mine'"):
            llm.chat(asking(alone()), GREEDY, cache_salt="another tenant")


def test_an_item_that_left_the_cache():
    """The engine holds the last picture only."""
    with LLM(**OPTIONS, feature_cache_memory="60KiB") as llm:
        llm.chat(asking(part_of(drawing(), uuid="mine")), GREEDY)
        llm.chat(asking(alone()), GREEDY)
        for colour in ("blue", "green", "black"):
            llm.chat(asking(part_of(drawing(colour), uuid=colour)), GREEDY)
        with pytest.raises(RequestError, match=UNKNOWN):
            llm.chat(asking(alone()), GREEDY)
        llm.chat(asking(alone("black")), GREEDY)


def client_of(app, key):
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://toolkit",
        headers={"Authorization": f"Bearer {key}"},
    )


def body(*parts):
    return {
        "model": "tiny-vision",
        "messages": asking(*parts),
        "temperature": 0,
        "max_tokens": 8,
        "seed": 0,
    }


async def check_tenants(app):
    """A uuid is known to the key that it came with."""
    async with client_of(app, "key-one") as one, client_of(app, "key-two") as two:
        refused = await one.post(CHAT, json=body(alone()))
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert UNKNOWN in error["message"] and error["param"] == "messages"
        whole = await one.post(CHAT, json=body(part_of(drawing(), uuid="mine")))
        assert whole.status_code == 200, whole.text
        again = await one.post(CHAT, json=body(alone()))
        assert again.status_code == 200, again.text
        answers = [reply.json()["choices"][0]["message"]["content"] for reply in (whole, again)]
        assert answers[0] == answers[1] != ""
        assert whole.json()["usage"]["prompt_tokens"] == again.json()["usage"]["prompt_tokens"]
        other = await two.post(CHAT, json=body(alone()))
        assert other.status_code == 400 and UNKNOWN in other.text


async def test_over_http():
    options = ServerOptions(api_key=["key-one", "key-two"])
    async with AsyncLLM(VllmConfig.make(**OPTIONS)) as llm:
        await check_tenants(create_app(llm, options))
