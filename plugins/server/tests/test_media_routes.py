"""Items of media on the routes: what `toolkit render` gives of them, and what the routes of an
engine pass on."""

from __future__ import annotations

import asyncio
import threading
import time
from base64 import b64decode, b64encode

import httpx
import msgspec
import numpy as np
import pytest
from toolkit_lm import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import Array, MultiModalFeatureSpec, PlaceholderRange
from toolkit_lm.plugin import Plugins
from toolkit_lm.renderer import MEDIA_OWNER, MultiModalRules, Rendered, Renderer
from toolkit_lm_server.app import create_app
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.held import HeldElsewhere
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.rendering import Rendering, create_render_app

pytestmark = pytest.mark.anyio
RENDER_CHAT = "/v1/chat/completions/render"
RENDER = "/v1/completions/render"


def url(data: bytes) -> str:
    return f"data:;base64,{b64encode(data).decode()}"


def chat(*images: bytes, **body):
    parts = [{"type": "image_url", "image_url": {"url": url(image)}} for image in images]
    return {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "hi"}]}],
        **body,
    }


class ByteImages(Renderer):
    """Each byte of an "image" is a token. A slow one takes its time, and a held one waits, in the
    thread that it is rendered in."""

    vocab_size = 256
    eos_token_ids = [0]

    def __init__(self, config) -> None:
        super().__init__(config)
        self.num_read = 0
        self.threads: set[str] = set()
        self.let = threading.Event()

    def render_conversation(self, messages, **kwargs):
        if not messages:
            raise RequestError("messages is empty.", "messages")
        parts = [part for message in messages for part in message["content"]]
        return self._rendered([part.get("text") or part["image_url"]["url"] for part in parts])

    def render_prompt(self, prompt, *, add_special_tokens=True):
        prompt = {"prompt": prompt} if isinstance(prompt, str) else prompt
        return self._rendered(
            [*prompt.get("multi_modal_data", {}).get("image", []), prompt["prompt"]]
        )

    def _rendered(self, parts):
        self.threads.add(threading.current_thread().name)
        token_ids = []
        features = []
        for part in parts:
            if part.startswith("data:"):
                feature = self._feature(
                    b64decode(part.partition(",")[2]), len(token_ids), len(features) + 1
                )
                features.append(feature)
                token_ids += [7] * feature.mm_position.length
            else:
                token_ids += part.encode()
        return Rendered(token_ids, features)

    def _feature(self, data, offset, number):
        if data == b"broken":
            raise RequestError(f"image {number}: it is no picture.", "messages")
        held = self.feature_cache.get(data.hex())
        if held is None:
            self.num_read += 1
            time.sleep(0.5 if data == b"slow" else 0)
            assert data != b"held" or self.let.wait(30)
        values = None if held else {"x": Array.of(np.frombuffer(data, np.uint8))}
        at = PlaceholderRange(offset, len(data), [True, *[False] * (len(data) - 1)])
        return MultiModalFeatureSpec(
            modality="image",
            mm_identifier=data.hex(),
            mm_position=at,
            data=values,
            layout={"n": [len(data)]},
        )

    def decode_stream(self, prompt_token_ids=(), *, skip_special_tokens=True):
        raise NotImplementedError

    def decode(self, token_ids, *, skip_special_tokens=False):
        return bytes(token_ids).decode()

    def token_texts(self, token_ids):
        return [chr(token_id) for token_id in token_ids]


@pytest.fixture(scope="module")
def made():
    config = VllmConfig.make(model="tiny", max_model_len=64)
    return Rendering(config, Plugins.load(config.plugins))


@pytest.fixture
def rendering(made):
    made.held = HeldElsewhere()
    made.renderer = ByteImages(made.config)
    made.renderer.feature_cache = made.held
    return made


@pytest.fixture
async def client(rendering):
    app = create_render_app(
        rendering, ServerOptions(), metrics=Metrics(), readiness=Readiness(rendering)
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://server"
    ) as one:
        yield one


async def test_features_come_with_the_tokens(client):
    found = (await client.post(RENDER_CHAT, json=chat(b"abc", b"de"))).json()
    assert found["token_ids"] == [7] * 5 + [*b"hi"]
    assert found["features"][1] == {
        "modality": "image",
        "mm_identifier": b"de".hex(),
        "mm_position": {"offset": 3, "length": 2, "mask": [True, False]},
        "data": {"x": {"dtype": "uint8", "shape": [2], "data": b64encode(b"de").decode()}},
        "layout": {"n": [2]},
    }
    assert (await client.post(RENDER_CHAT, json=chat())).json()["features"] is None


async def test_msgpack_is_for_those_who_accept_it(client):
    plain = (await client.post(RENDER_CHAT, json=chat(b"abc"))).json()
    for accept, kind in (
        ("application/msgpack", "application/msgpack"),
        ("application/x-msgpack; q=0.9, application/json", "application/x-msgpack"),
        ("application/msgpack;q=0, */*", "application/json"),
        ("*/*", "application/json"),
    ):
        for path, body in ((RENDER_CHAT, chat(b"abc")), (RENDER, {"prompt": ["hi", "ho"]})):
            answer = await client.post(path, json=body, headers={"accept": accept})
            assert answer.headers["content-type"] == kind
            found = (
                msgspec.json.decode(answer.content)
                if kind == "application/json"
                else msgspec.msgpack.decode(answer.content)
            )
            if path == RENDER:
                assert [one["token_ids"] for one in found["data"]] == [[*b"hi"], [*b"ho"]]
                continue
            array = found["features"][0]["data"]["x"]
            assert array["data"] in (b"abc", b64encode(b"abc").decode())
            assert found["token_ids"] == plain["token_ids"]


async def test_what_an_engine_holds_is_neither_sent_nor_read_again(client, rendering):
    whole = (await client.post(RENDER_CHAT, json=chat(b"abc", b"de"))).json()
    held = [b"abc".hex(), "unknown"]
    found = (await client.post(RENDER_CHAT, json=chat(b"abc", b"de", held=held))).json()
    assert rendering.renderer.num_read == 3, "de is read again, abc is not"
    assert found["features"][0].pop("data") is None
    whole["features"][0].pop("data")
    assert found == whole
    # Another server has rendered it: it is read, and not sent.
    rendering.renderer.feature_cache = rendering.held = HeldElsewhere()
    found = (await client.post(RENDER_CHAT, json=chat(b"abc", held=held))).json()
    assert (rendering.renderer.num_read, found["features"][0]["data"]) == (4, None)
    # Nobody else's request is told so.
    found = (await client.post(RENDER_CHAT, json=chat(b"abc"))).json()
    assert found["features"][0]["data"] is not None


async def test_a_server_remembers_so_much():
    known = HeldElsewhere(most=300)
    for i in range(5):
        at = PlaceholderRange(0, 100, None)
        data = {"x": Array.of(np.zeros(3, np.uint8))}
        feature = MultiModalFeatureSpec(
            modality="image", mm_identifier=str(i), mm_position=at, data=data
        )
        known.without_data(Rendered([5] * 100, [feature, feature]))
    with known.of([str(i) for i in range(5)]):
        assert [known.get(str(i)) is not None for i in range(5)] == [False, False, True, True, True]
        assert known.get("4") == ([5] * 100, None, {}, 3)
    assert known.get("4") is None


async def test_images_beside_a_prompt(client):
    media = {"multi_modal_data": {"image": [url(b"abc")]}}
    [found] = (await client.post(RENDER, json={"prompt": "hi", **media})).json()["data"]
    assert (found["token_ids"], len(found["features"])) == ([7, 7, 7, *b"hi"], 1)
    refused = await client.post(RENDER, json={"prompt": ["hi", "ho"], **media})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "multi_modal_data")


async def test_placeholders_without_an_item_are_refused(client, rendering):
    class Rules(MultiModalRules):
        def placeholder_id(self, modality):
            return 7

    rendering.renderer.set_rules(Rules(rendering.config))
    for body in (
        {"prompt": "a\x07"},
        {"prompt": "\x07", "multi_modal_data": {"image": [url(b"abc")]}},
    ):
        for more in ({}, {"check_length": False}):
            error = (await client.post(RENDER, json={**body, **more})).json()["error"]
            assert "the prompt has 1 placeholders" in error["message"]
    assert (await client.post(RENDER_CHAT, json=chat(b"abc"))).status_code == 200


async def test_who_checks_the_length(client):
    assert (await client.post(RENDER_CHAT, json=chat(b"a" * 100))).json()["error"][
        "code"
    ] == "context_length_exceeded"
    assert (
        len(
            (await client.post(RENDER_CHAT, json=chat(b"a" * 100, check_length=False))).json()[
                "token_ids"
            ]
        )
        == 102
    )
    cut = (await client.post(RENDER_CHAT, json=chat(b"a" * 9, truncate_prompt_tokens=11))).json()
    assert cut["features"][0]["mm_position"]["offset"] == 0
    refused = await client.post(RENDER_CHAT, json=chat(b"a" * 9, truncate_prompt_tokens=4))
    assert (refused.status_code, refused.json()["error"]["param"]) == (
        400,
        "truncate_prompt_tokens",
    )


async def test_a_bad_item_is_named_and_the_request_beside_it_goes_on(client):
    bad, good = await asyncio.gather(
        client.post(RENDER_CHAT, json=chat(b"abc", b"broken")),
        client.post(RENDER_CHAT, json=chat(b"abc", b"de")),
    )
    assert (bad.status_code, bad.json()["error"]["message"]) == (400, "image 2: it is no picture.")
    assert good.status_code == 200


async def test_what_is_rendered_has_a_cost(rendering):
    """Each request, and all together: those under way are let end."""
    options = ServerOptions(max_request_cost="16MiB")
    app = create_render_app(rendering, options, metrics=Metrics(), readiness=Readiness(rendering))
    rendering.renderer.media_size = lambda part, options: (
        (9 * 2**20, 0) if part.get("image_url") or part.get("image") else None
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://server"
    ) as client:
        large = chat(b"abc", b"de")
        media = {"prompt": "hi", "multi_modal_data": {"image": [url(b"abc")] * 2}}
        for path, body in (
            (RENDER_CHAT, large),
            (RENDER, media),
            ("/tokenize", large),
            (RENDER, {"prompt": "a" * 2**19}),
        ):
            refused = await client.post(path, json=body)
            assert refused.status_code == 400, path
            assert "may take 16 MiB (max_request_cost)" in refused.json()["error"]["message"]
        found = await asyncio.gather(
            *(client.post(RENDER_CHAT, json=chat(b"slow")) for _ in range(6))
        )
        assert sorted({one.status_code for one in found}) == [200, 429]
        assert (await client.post(RENDER_CHAT, json=chat(b"abc"))).status_code == 200


async def test_work_on_an_image_holds_up_nobody(client, rendering):
    """It is done in another thread than the event loop's."""
    held = asyncio.create_task(client.post(RENDER_CHAT, json=chat(b"held")))
    while not rendering.renderer.num_read:
        await asyncio.sleep(0.01)
    assert (await client.get("/health")).status_code == 200
    assert not held.done()
    rendering.renderer.let.set()
    assert (await held).status_code == 200
    assert threading.main_thread().name not in rendering.renderer.threads


async def test_an_engine_gets_content_parts_and_options_as_they_are(engine, client_of):
    async with client_of(create_app(engine)) as client:
        body = chat(b"abc", mm_processor_kwargs={"max_pixels": 100}, max_tokens=4)
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 400, (
            "more tokens than the fake engine takes"
        )
        assert engine.renderer.kwargs["mm_processor_kwargs"] == {"max_pixels": 100}
        wrong = await client.post("/v1/chat/completions", json={**body, "mm_processor_kwargs": 5})
        assert wrong.json()["error"]["param"] == "mm_processor_kwargs"


async def test_a_renderer_that_fails_elsewhere_is_not_the_requests_fault(engine, client_of):
    from toolkit_lm_renderer_remote.errors import BadAnswerError, UnreachableError

    for error, status, code in (
        (UnreachableError("none"), 503, "renderer_unreachable"),
        (BadAnswerError("odd"), 502, "renderer_bad_answer"),
    ):

        def fail(*_, error=error, **__):
            raise error

        engine.renderer.render_conversation = fail
        async with client_of(create_app(engine)) as client:
            answer = await client.post("/v1/chat/completions", json=chat())
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert ("retry-after" in answer.headers) is (status == 503)


async def test_an_engine_tells_the_tenant_that_asks_it():
    """Owners that an engine names are within its own key."""
    owners = []
    for own, owner in (("", ""), ("", "a"), ("front", ""), ("front", "a")):
        token = MEDIA_OWNER.set(own)
        try:
            with HeldElsewhere().of([], owner):
                owners.append(MEDIA_OWNER.get())
            assert MEDIA_OWNER.get() == own
        finally:
            MEDIA_OWNER.reset(token)
    assert owners == ["", "\na", "front", "front\na"]
