"""RemoteRenderer: what it asks, what it makes of answers, and what it does itself."""

from __future__ import annotations

import asyncio
import json
from functools import cached_property

import httpx
import pytest
from toolkit_lm import VllmConfig
from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm.plugin import Plugins
from toolkit_lm.renderer import MEDIA_OWNER, MultiModalRules, Renderer, Replacement
from toolkit_lm.renderer.feature_lookup import HeldFeature
from toolkit_lm.resolution.resolution import resolve_configured
from toolkit_lm_renderer_remote.errors import BadAnswerError
from toolkit_lm_renderer_remote.renderer import RemoteRenderer
from toolkit_lm_renderer_remote.servers import RenderServers

IMAGE = 7
ARRAY = {"dtype": "float32", "shape": [2], "data": "AAAAAAAAAAA="}
CHAT = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": "data:;base64,YQ=="}},
            {"type": "text", "text": "a"},
        ],
    }
]


class Rules(MultiModalRules):
    """A picture of n numbers is n tokens."""

    def placeholder_id(self, modality):
        return IMAGE

    def replacement(self, modality, data):
        if set(data) != {"x"} or data["x"].ndim != 1:
            raise RequestError("x must be a row of numbers.")
        return Replacement([IMAGE] * len(data["x"]))


class Cache:
    """Items that the engine holds; and those it has forgotten when asked."""

    def __init__(self, held=(), gone=()) -> None:
        self.held = list(held)
        self.gone = gone
        self.asked = []

    def held_keys(self, limit):
        return self.held[:limit]

    def get(self, identifier):
        self.asked.append(identifier)
        return None if identifier in self.gone else HeldFeature([IMAGE] * 2, None, {}, 8)


def feature(name="a", offset=1, **changed):
    return {
        "modality": "image",
        "mm_identifier": name,
        "mm_position": {"offset": offset, "length": 2},
        "data": {"x": ARRAY},
        **changed,
    }


@pytest.fixture(scope="module")
def config():
    config = VllmConfig.make(model="tiny", renderer_url=["http://here"], max_model_len=64)
    return resolve_configured(config, Plugins.load(config.plugins))


@pytest.fixture
def asked():
    return []


class Content(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Content as it comes from a server, for either kind of client."""

    def __init__(self, content):
        self.content = content

    def __iter__(self):
        yield self.content

    async def __aiter__(self):
        yield self.content


class Awaited(RemoteRenderer):
    """The same, awaited."""

    def render_conversation(self, *arguments, **options):
        return asyncio.run(self.render_conversation_async(*arguments, **options))

    def render_prompt(self, *arguments, **options):
        return asyncio.run(self.render_prompt_async(*arguments, **options))


@pytest.fixture(params=[RemoteRenderer, Awaited])
def make(config, asked, request):
    """make(answer, ...): a renderer whose server gives these answers, one after the other."""
    kind = request.param

    def made(*answers, cache=None):
        left = iter(answers)

        def answer(request):
            asked.append((request.url.path, json.loads(request.content)))
            return httpx.Response(
                200,
                stream=Content(json.dumps(next(left)).encode()),
                headers={"content-type": "application/json"},
            )

        one = kind(config)
        one._servers = RenderServers(["http://here"], transport=httpx.MockTransport(answer))
        one.set_rules(Rules(config))
        one.feature_cache = cache
        return one

    return made


def test_a_chat_with_a_picture(make, asked):
    rendered = make(
        {"token_ids": [5, IMAGE, IMAGE, 6], "features": [feature()]}
    ).render_conversation(
        CHAT,
        add_generation_prompt=False,
        chat_template_kwargs=None,
        mm_processor_kwargs={"max_pixels": 5},
    )
    assert rendered.token_ids == [5, IMAGE, IMAGE, 6]
    assert rendered.features[0].data["x"].to_numpy().tolist() == [0, 0]
    body = {
        "messages": CHAT,
        "add_generation_prompt": False,
        "mm_processor_kwargs": {"max_pixels": 5},
        "check_length": False,
    }
    assert asked == [("/v1/chat/completions/render", body)]


def test_prompts(make, asked):
    renderer = make(
        {"tokens": [5, 6]},
        {"data": [{"token_ids": [IMAGE, IMAGE], "features": [feature(offset=0)]}]},
    )
    assert renderer.render_prompt("ab", add_special_tokens=False) == ([5, 6], None)
    assert renderer.render_prompt({"prompt_token_ids": [8, 9]}) == ([8, 9], None)
    rendered = renderer.render_prompt({"prompt": "<image>", "multi_modal_data": {"image": b"a"}})
    assert len(rendered.features) == 1
    sent = {"image": "data:application/octet-stream;base64,YQ=="}
    assert asked == [
        ("/tokenize", {"prompt": "ab", "add_special_tokens": False}),
        (
            "/v1/completions/render",
            {
                "prompt": "<image>",
                "add_special_tokens": True,
                "multi_modal_data": sent,
                "check_length": False,
            },
        ),
    ]


def test_items_by_uuid_alone_are_asked_for_of_their_tenant(make, asked):
    cache = Cache(["a"])
    answers = (
        {"token_ids": [5, IMAGE, IMAGE], "features": [feature(data=None)]},
        {"data": [{"token_ids": [IMAGE, IMAGE], "features": [feature(data=None, offset=0)]}]},
    )
    renderer = make(*answers, cache=cache)
    part = {"type": "image_url", "image_url": None, "uuid": "mine"}
    token = MEDIA_OWNER.set("a key")
    try:
        renderer.render_conversation([{"role": "user", "content": [part]}])
        renderer.render_prompt({"prompt": "<image>", "multi_modal_uuids": {"image": "mine"}})
    finally:
        MEDIA_OWNER.reset(token)
    chat, prompt = (body for _, body in asked)
    assert chat["messages"][0]["content"] == [part]
    assert prompt["multi_modal_data"] == {"image": [None]}
    assert prompt["multi_modal_uuids"] == {"image": "mine"}
    assert chat["media_owner"] == prompt["media_owner"] == "a key"


def test_what_the_engine_holds_is_told_and_left_out(make, asked):
    cache = Cache(["b", "a"])
    rendered = make(
        {"token_ids": [5, IMAGE, IMAGE], "features": [feature(data=None)]}, cache=cache
    ).render_conversation(CHAT)
    assert rendered.features[0].data is None
    assert asked[0][1]["held"] == ["b", "a"]
    assert cache.asked == ["a"], "it stays until the request is sent"


def test_what_the_engine_has_forgotten_meanwhile_is_asked_for_again(make, asked):
    answers = [
        {"token_ids": [5, IMAGE, IMAGE], "features": [feature(data=data)]}
        for data in (None, {"x": ARRAY})
    ]
    rendered = make(*answers, cache=Cache(["a"], gone=["a"])).render_conversation(CHAT)
    assert rendered.features[0].data is not None
    assert [body.get("held") for _, body in asked] == [["a"], None]


@pytest.mark.parametrize(
    "answer",
    [
        {"token_ids": [5, 10**6]},
        {"token_ids": [5, -1]},
        {"token_ids": [5, IMAGE, IMAGE], "features": [feature(data=None)]},
        {
            "token_ids": [5, IMAGE, IMAGE],
            "features": [feature(data={"x": {**ARRAY, "shape": [1, 2]}})],
        },
        {"token_ids": [5, IMAGE, IMAGE], "features": [feature(data={"y": ARRAY})]},
        {"token_ids": [5, IMAGE, 6], "features": [feature()]},
        {"token_ids": [5, IMAGE, IMAGE], "features": [feature(modality="video")]},
        {"token_ids": [5, IMAGE, IMAGE], "features": [feature(layout={"a": [1]})]},
        {"token_ids": [IMAGE] * 5, "features": [feature(), feature(offset=3)]},
        {"token_ids": [5, 6]},
        {"token_ids": [5, 6], "features": []},
        {"data": []},
    ],
)
def test_what_is_not_of_this_model_is_no_answer(make, answer):
    with pytest.raises(BadAnswerError):
        make(answer).render_conversation(CHAT)


def test_a_chat_without_media_has_no_features(make):
    with pytest.raises(BadAnswerError, match=r"at most|features"):
        make({"token_ids": [5, IMAGE, IMAGE], "features": [feature()]}).render_conversation(
            [{"role": "user", "content": "a"}]
        )


def test_an_answer_without_media_is_small(make):
    """An answer's size limit follows its tokens: a GiB is only for media."""
    with pytest.raises(BadAnswerError, match="more than"):
        make({"token_ids": [5] * 100_000}).render_conversation([{"role": "user", "content": "a"}])


def test_media_that_are_too_large_are_refused_by_the_name_of_the_option(make, config):
    assert RemoteRenderer(config)._most_media == 2**30
    renderer = make({"token_ids": [5] * 100_000, "features": []})
    renderer._most_media = 1000
    with pytest.raises(RequestError, match=r"renderer_remote\.max_answer_size is 1000 bytes"):
        renderer.render_conversation(CHAT)


@pytest.mark.parametrize("given", [5, {"prompt": object()}, {"text": "a"}])
def test_what_is_no_prompt_is_refused_here(make, given):
    with pytest.raises(RequestError):
        make().render_prompt(given)
    with pytest.raises(RequestError, match="takes no option 'toools'"):
        make().render_conversation(CHAT, toools=[])


def test_text_is_made_here(make, config):
    renderer = make()
    stream = renderer.decode_stream([5])
    assert (
        stream.push([300, 301]) + stream.flush()
        == renderer.decode([5, 300, 301])[len(renderer.decode([5])) :]
    )
    assert renderer.vocab_size >= config.vocab_size
    assert renderer.eos_token_ids
    assert len(renderer.token_texts([5, 6])) == 2
    assert (
        renderer.render_texts(["a b"])[0].token_ids
        == renderer._local.render_prompt("a b").token_ids
    )
    assert renderer.cut_texts(["a b c d"], 2) != ["a b c d"]


def test_without_a_tokenizer_here_it_says_what_to_do(config, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"nothing here reads the model's tokenizer: .* Give its folder with tokenizer=",
    ):
        RemoteRenderer(config.replace(tokenizer=str(tmp_path)))


def test_its_options_are_checked(config):
    for options in ({"max_answer_size": "0.5"}, {"timeout": -1.0}):
        with pytest.raises(ConfigError):
            RemoteRenderer(config.replace(plugin_option={"renderer_remote": options}))


PROPERTIES = sorted(
    name
    for name, one in vars(Renderer).items()
    if isinstance(one, property | cached_property) and not name.startswith("_")
)
STATED = {"has_chat_template": True}
"""Properties that do not depend on the checkpoint's tokenizer here."""


class Local:
    """A renderer in this process, whose properties are told from each other."""

    def __getattr__(self, name):
        return f"the local {name}"


@pytest.mark.parametrize("name", PROPERTIES)
def test_each_property_of_the_contract_is_forwarded_or_stated(config, name):
    """The contract's default would be a guess."""
    renderer = RemoteRenderer(config)
    renderer._local = Local()
    assert name in vars(RemoteRenderer), f"RemoteRenderer must forward or state {name}"
    assert getattr(renderer, name) == STATED.get(name, f"the local {name}")


def test_the_names_that_the_template_reads_are_known(config):
    assert "messages" in RemoteRenderer(config).template_names
