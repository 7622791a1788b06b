"""Items of media that are given by their uuid alone, after they were given with it."""

from __future__ import annotations

import json

import pytest
from seeing import LLAVA, QWEN, LlavaRules, QwenRules, train_newlines
from test_media_items import CLIP, QWEN_IMAGES, Held, chat, data_url, file_of, of, pixels
from toolkit_lm.errors import RequestError
from toolkit_lm.renderer import MEDIA_OWNER
from toolkit_lm_renderer_hf import media
from toolkit_lm_renderer_hf.media_items import Item
from toolkit_lm_renderer_hf.named_media import NamedMedia

UNKNOWN = "no item of uuid 'a' is in the cache of media"


@pytest.fixture(scope="module")
def tokenizer():
    return train_newlines()


def made_with(rules, tokenizer, make_renderer):
    files = {
        "chat_template.jinja": QWEN if rules is QwenRules else LLAVA,
        "preprocessor_config.json": json.dumps(QWEN_IMAGES if rules is QwenRules else CLIP),
    }
    renderer = make_renderer(tokenizer, files=files, hf_config={"vocab_size": 400})
    renderer.set_rules(rules(renderer.config))
    renderer.feature_cache = Held()
    return renderer


@pytest.fixture
def llava(tokenizer, make_renderer):
    return made_with(LlavaRules, tokenizer, make_renderer)


def alone(uuid="a", **more):
    return {"type": "image_url", "image_url": None, "uuid": uuid, **more}


@pytest.fixture
def given(llava):
    """The rendering of a picture with the uuid "a", which the engine holds."""
    rendered = llava.render_conversation(chat("see", of(pixels(), uuid="a")))
    llava.feature_cache.take(rendered)
    return rendered


@pytest.mark.parametrize(
    "part",
    [
        alone(),
        {"type": "image_url", "uuid": "a"},
        {"type": "image_url", "image_url": {"url": None}, "uuid": "a"},
        {"type": "image", "image": None, "uuid": "a"},
        {"type": "image_embeds", "image_embeds": None, "uuid": "a"},
    ],
)
def test_a_part_is_the_item_given_before(llava, given, part):
    again = llava.render_conversation(chat("see", part))
    assert again.token_ids == given.token_ids
    [feature] = again.features
    assert feature.data is None and feature.mm_identifier == given.features[0].mm_identifier
    assert feature.mm_position == given.features[0].mm_position
    assert llava.media_size(part, {}) == (0, 0)


@pytest.mark.parametrize("data", [{}, {"image": None}, {"image": [None]}])
@pytest.mark.parametrize("names", ["a", ["a"]])
def test_an_item_of_a_prompt_is_the_item_given_before(llava, given, data, names):
    prompt = {"prompt": "<image>", "multi_modal_data": data, "multi_modal_uuids": {"image": names}}
    [feature] = llava.render_prompt(prompt).features
    assert feature.data is None and feature.mm_identifier == given.features[0].mm_identifier


def test_items_given_and_named_in_turn(llava, given):
    prompt = {
        "prompt": "<image> <image> <image>",
        "multi_modal_data": {"image": [pixels(1), None, pixels(2)]},
        "multi_modal_uuids": {"image": [None, "a", "b"]},
    }
    features = llava.render_prompt(prompt).features
    assert [feature.data is None for feature in features] == [False, True, False]


def test_a_name_of_the_same_prompt(llava):
    """The engine need not hold what comes with the prompt itself."""
    both = llava.render_conversation(chat(of(pixels(), uuid="a"), alone())).features
    assert both[0].mm_identifier == both[1].mm_identifier
    assert both[0].data is not None and both[1].data is not None


def test_the_item_given_last_counts(llava, given):
    file = data_url(file_of(pixels(1)))
    newer = llava.render_conversation(chat({**alone(), "image_url": {"url": file}}))
    llava.feature_cache.take(newer)
    [feature] = llava.render_conversation(chat(alone())).features
    assert feature.mm_identifier == newer.features[0].mm_identifier
    assert feature.mm_identifier != given.features[0].mm_identifier


@pytest.mark.parametrize("cache", ["empty", "none"])
def test_an_item_that_the_engine_does_not_hold(llava, cache):
    llava.render_conversation(chat(of(pixels(), uuid="a")))
    if cache == "none":
        llava.feature_cache = None
    for part in (alone(), alone("b")):
        with pytest.raises(RequestError, match=r"image 1: no item of uuid '[ab]' is in") as error:
            llava.render_conversation(chat(part))
        assert error.value.param == "messages" and "feature_cache_memory" in str(error.value)


def test_names_are_of_tenants(llava, given):
    token = MEDIA_OWNER.set("another")
    try:
        with pytest.raises(RequestError, match=UNKNOWN):
            llava.render_conversation(chat(alone()))
    finally:
        MEDIA_OWNER.reset(token)
    assert llava.render_conversation(chat(alone())).features[0].data is None


def test_names_are_of_options(tokenizer, make_renderer):
    """An item processed in another way is another item."""
    qwen = made_with(QwenRules, tokenizer, make_renderer)
    small = {"mm_processor_kwargs": {"max_pixels": 28 * 28 * 4}}
    qwen.feature_cache.take(
        qwen.render_conversation(chat(of(pixels(0, 112, 112), uuid="a")), **small)
    )
    assert qwen.render_conversation(chat(alone()), **small).features[0].data is None
    with pytest.raises(RequestError, match=UNKNOWN):
        qwen.render_conversation(chat(alone()))


def test_items_without_data_or_uuid(llava):
    for prompt in (
        {"multi_modal_data": {"image": [None]}},
        {"multi_modal_uuids": {"image": [None]}},
        {
            "multi_modal_data": {"image": [pixels(), None]},
            "multi_modal_uuids": {"image": ["a", None]},
        },
    ):
        with pytest.raises(RequestError, match=r"image [12]: give the item, or the uuid"):
            llava.render_prompt({"prompt": "<image>", **prompt})
    with pytest.raises(RequestError, match="multi_modal_uuids has 1 of 'image' for 2 items"):
        llava.render_prompt(
            {
                "prompt": "<image><image>",
                "multi_modal_data": {"image": [pixels(), None]},
                "multi_modal_uuids": {"image": ["a"]},
            }
        )


def test_few_names_are_kept():
    named = NamedMedia(most=2)
    items = [Item("image", None, "image 1", "messages", uuid=name) for name in "abc"]
    named.add(items[0], {}, "0")
    named.add(items[1], {}, "1")
    assert named.get(items[0], {}) == "0"
    named.add(items[2], {}, "2")
    assert [named.get(item, {}) for item in items] == ["0", None, "2"]


def test_a_refused_item_has_no_name(llava, monkeypatch):
    added = []
    monkeypatch.setattr(media.NamedMedia, "add", lambda self, item, *_: added.append(item.uuid))
    with pytest.raises(RequestError):
        llava.render_conversation(chat(of(b"broken", uuid="a")))
    llava.render_conversation(chat(of(pixels(), uuid="b")))
    assert added == ["b"]
