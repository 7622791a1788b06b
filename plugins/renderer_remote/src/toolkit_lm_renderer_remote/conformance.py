"""RenderServerConformance: what every render server must do, in whatever language it is written.
Needs pytest."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import httpx
import msgspec
import pytest
from toolkit_lm.renderer import Rendered

from toolkit_lm_renderer_remote.reading import Answer
from toolkit_lm_renderer_remote.wire import (
    MSGPACK,
    RENDER_CHAT,
    RENDER_PROMPTS,
    TOKENIZE,
    Derendered,
    ErrorAnswer,
    RenderedPrompt,
    RenderedPrompts,
    TokenizedText,
)

Kind = TypeVar("Kind")


class RenderServerConformance:
    """Subclass it as `class TestMine(RenderServerConformance)`, with a fixture `url`: where the
    server listens."""

    texts: ClassVar[Sequence[str]] = ("The cat sat.", " spaces ", "héllo 😀 日本語", "a\n\nb\tc")
    """Texts that come back as they are from tokens, without special tokens."""
    images: ClassVar[Sequence[bytes]] = ()
    """Files of two pictures that differ. None: the model takes no images."""
    takes_media_in_prompts: ClassVar[bool] = True
    """`multi_modal_data`, by one placeholder each in a plain prompt, which is `placeholder`."""
    placeholder: ClassVar[str] = "<image>"
    speaks_msgpack: ClassVar[bool] = False
    """Whether the server answers in msgpack if a client accepts it."""

    @pytest.fixture
    def client(self, url: str) -> Iterator[httpx.Client]:
        with httpx.Client(base_url=url, timeout=60) as client:
            yield client

    def ask(self, client: httpx.Client, path: str, kind: type[Kind], **body: Any) -> Kind:
        """An answer, which is what its schema says."""
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("application/json")
        return msgspec.json.decode(response.content, type=kind)

    def refused(self, client: httpx.Client, path: str, **body: Any) -> ErrorAnswer:
        """A refusal, which is the request's fault and says why."""
        response = client.post(path, json=body)
        assert response.status_code == 400, response.text
        found = msgspec.json.decode(response.content, type=ErrorAnswer)
        assert found.error.message
        return found

    # Text

    def test_a_conversation(self, client: httpx.Client) -> None:
        found = self.ask(
            client, RENDER_CHAT, RenderedPrompt, messages=[{"role": "user", "content": "Hello"}]
        )
        assert found.token_ids
        assert not found.features
        assert "Hello" in self.ask(client, "/derender", Derendered, token_ids=found.token_ids).text

    def test_prompts_are_answered_in_order(self, client: httpx.Client) -> None:
        [rendered] = self.ask(client, RENDER_PROMPTS, RenderedPrompts, prompt="one").data
        [first, second] = self.ask(
            client, RENDER_PROMPTS, RenderedPrompts, prompt=["one", "two"]
        ).data
        assert first.token_ids == rendered.token_ids != second.token_ids
        [echoed] = self.ask(client, RENDER_PROMPTS, RenderedPrompts, prompt=rendered.token_ids).data
        assert echoed.token_ids == rendered.token_ids

    def test_texts_come_back(self, client: httpx.Client) -> None:
        for text in self.texts:
            tokens = self.ask(
                client, TOKENIZE, TokenizedText, prompt=text, add_special_tokens=False
            ).tokens
            whole = self.ask(client, "/derender", Derendered, token_ids=tokens).text
            rest = self.ask(
                client, "/derender", Derendered, token_ids=tokens[1:], prompt_token_ids=tokens[:1]
            ).text
            assert whole == text
            assert rest and (whole.endswith(rest) or "�" in rest)

    def test_a_prompt_that_is_too_long(self, client: httpx.Client) -> None:
        longest = self.ask(
            client, RENDER_CHAT, RenderedPrompt, messages=[{"role": "user", "content": "a"}]
        ).max_model_len
        if longest is None:
            return
        [token, *_] = self.ask(
            client, TOKENIZE, TokenizedText, prompt="a", add_special_tokens=False
        ).tokens
        error = self.refused(client, RENDER_PROMPTS, prompt=[token] * longest).error
        assert error.code == "context_length_exceeded"
        [found] = self.ask(
            client, RENDER_PROMPTS, RenderedPrompts, prompt=[token] * longest, check_length=False
        ).data
        assert len(found.token_ids) == longest

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (RENDER_CHAT, {}),
            (RENDER_CHAT, {"messages": []}),
            (RENDER_CHAT, {"messages": "hello"}),
            (RENDER_CHAT, {"messages": [5]}),
            (RENDER_PROMPTS, {}),
            (RENDER_PROMPTS, {"prompt": ""}),
            (RENDER_PROMPTS, {"prompt": [[]]}),
            (RENDER_PROMPTS, {"prompt": [-1]}),
            (RENDER_PROMPTS, {"prompt": [10**12]}),
            (TOKENIZE, {"prompt": 5}),
            ("/derender", {"token_ids": [-1]}),
            ("/derender", {"token_ids": "a"}),
        ],
    )
    def test_a_bad_request_is_refused_with_a_reason(
        self, client: httpx.Client, path: str, body: dict[str, Any]
    ) -> None:
        self.refused(client, path, **body)

    def test_a_body_that_is_no_json_is_refused(self, client: httpx.Client) -> None:
        assert (
            client.post(
                RENDER_CHAT, content=b"{", headers={"content-type": "application/json"}
            ).status_code
            == 400
        )
        self.test_a_conversation(client)

    # Media

    def chat(
        self, client: httpx.Client, *images: bytes, accept: str = "application/json", **body: Any
    ) -> Rendered:
        """A conversation with images, as an engine reads the answer."""
        messages = [
            {
                "role": "user",
                "content": [*map(_part, images), {"type": "text", "text": "What is it?"}],
            }
        ]
        response = client.post(
            RENDER_CHAT, json={"messages": messages, **body}, headers={"accept": accept}
        )
        assert response.status_code == 200, response.text
        return Answer(response.content, response.headers["content-type"]).prompt(
            len(images), body.get("held", ())
        )

    def test_images_are_features_in_their_order(self, client: httpx.Client) -> None:
        if not self.images:
            error = client.post(
                RENDER_CHAT,
                json={"messages": [{"role": "user", "content": [_part(b"P6 1 1 255\nabc")]}]},
            )
            assert error.status_code == 400
            return
        first, second = self.images
        found = self.chat(client, first, second, first).features
        assert found is not None
        assert [item.modality for item in found] == ["image"] * 3
        assert found[0].mm_identifier == found[2].mm_identifier != found[1].mm_identifier
        assert all(item.data for item in found)
        assert (found[0].data, found[0].layout) == (found[2].data, found[2].layout)

    def test_what_the_engine_holds_is_left_out(self, client: httpx.Client) -> None:
        if self.images:
            whole = self.chat(client, *self.images)
            assert whole.features is not None
            held = whole.features[0].mm_identifier
            for _ in range(2):
                found = self.chat(client, *self.images, held=[held, "another"])
                assert found.token_ids == whole.token_ids
                assert found.features is not None
                assert [feature.data is None for feature in found.features] == [True, False]
                assert [feature.mm_position for feature in found.features] == [
                    feature.mm_position for feature in whole.features
                ]
                assert [feature.layout for feature in found.features] == [
                    feature.layout for feature in whole.features
                ]

    def test_a_broken_image_is_named(self, client: httpx.Client) -> None:
        if self.images:
            messages = [{"role": "user", "content": [_part(self.images[0]), _part(b"no picture")]}]
            assert "2" in self.refused(client, RENDER_CHAT, messages=messages).error.message
            self.chat(client, *self.images)

    def test_images_in_a_prompt(self, client: httpx.Client) -> None:
        if self.images and self.takes_media_in_prompts:
            media = {"image": [_url(image) for image in self.images]}
            response = client.post(
                RENDER_PROMPTS,
                json={
                    "prompt": f"{self.placeholder}{self.placeholder}a",
                    "multi_modal_data": media,
                },
            )
            assert response.status_code == 200, response.text
            found = Answer(response.content, response.headers["content-type"]).only_prompt(2)
            assert found.features is not None
            in_chat = self.chat(client, *self.images).features
            assert in_chat is not None
            assert [feature.mm_identifier for feature in found.features] == [
                feature.mm_identifier for feature in in_chat
            ]
            self.refused(client, RENDER_PROMPTS, prompt=self.placeholder, multi_modal_data=media)

    def test_msgpack_says_the_same(self, client: httpx.Client) -> None:
        images = self.images
        for accept in MSGPACK:
            found = self.chat(client, *images, accept=f"{accept}, application/json;q=0.5")
            plain = self.chat(client, *images)
            assert found == plain
            sent = client.post(
                RENDER_CHAT,
                json={"messages": [{"role": "user", "content": "a"}]},
                headers={"accept": accept},
            )
            assert sent.headers["content-type"].startswith(
                accept if self.speaks_msgpack else "application/json"
            )


def _part(image: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": _url(image)}}


def _url(image: bytes) -> str:
    return f"data:application/octet-stream;base64,{b64encode(image).decode()}"
