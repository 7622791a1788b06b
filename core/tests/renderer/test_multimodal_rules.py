"""Rules of multimodal models, and what the processor makes of a renderer's items."""

from __future__ import annotations

import numpy as np
import pytest
from toolkit_lm.config import Checkpoint, PluginsConfig, VllmConfig
from toolkit_lm.engine.feature_mirror import FeatureMirror
from toolkit_lm.errors import PluginError, RequestError
from toolkit_lm.kv import KVCacheConfig
from toolkit_lm.messages import Array, CacheKey, MultiModalFeatureSpec, PlaceholderRange
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm.processing import RequestLimits
from toolkit_lm.processing.pinned_rendering import PinnedRendering
from toolkit_lm.processing.processor import Processor
from toolkit_lm.prompts import parse_prompt
from toolkit_lm.renderer import MultiModalRules, Rendered, Renderer, Replacement, make_renderer

IMAGE = 9
END = 8


class Rules(MultiModalRules):
    """An image of n rows is n tokens and one that ends it."""

    def placeholder_id(self, modality):
        return IMAGE

    def replacement(self, modality, data):
        (rows,) = data.values()
        if rows.ndim != 2:
            raise RequestError("its array must have 2 axes.")
        return Replacement(
            [IMAGE] * len(rows) + [END], [True] * len(rows) + [False], {"rows": [len(rows)]}
        )


class Plain(Renderer):
    """Gives what it is given, and asks whether the engine holds what has no data."""

    def render_prompt(self, prompt, *, add_special_tokens=True):
        parsed = parse_prompt(prompt, media=True)
        features = parsed.get("multi_modal_data", {}).get("image")
        for one in features or ():
            if one.data is None and self.feature_cache is not None:
                self.feature_cache.get(one.mm_identifier)
        return Rendered(parsed["prompt_token_ids"], features)

    def render_conversation(self, messages, **kwargs):
        return self.render_prompt(messages[0])

    def decode_stream(self, prompt_token_ids=(), *, skip_special_tokens=True):
        raise NotImplementedError

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "text"

    def token_texts(self, token_ids):
        raise NotImplementedError

    vocab_size = 10
    eos_token_ids = [0]


class Seeing:
    """A plugin: an architecture with rules, and the renderer."""

    def __init__(self, rules="Rules"):
        self.rules = rules

    @hookimpl
    def toolkit_register_models(self, models):
        models.add("Seeing", "nowhere:Model", multimodal=f"{__name__}:{self.rules}")

    @hookimpl
    def toolkit_register_renderers(self, renderers):
        renderers.add("plain", f"{__name__}:Plain", reads=())


def processor(architecture="Seeing", rules="Rules"):
    plugins = Plugins.load(PluginsConfig(plugins=["pooling_adapters"]), [Seeing(rules)])
    config = VllmConfig.default(
        {"vocab_size": 10, "hidden_size": 4}, renderer="plain", model="seer"
    )
    config = config.with_checkpoint(
        Checkpoint(path="", architecture=architecture, hf_config=config.hf_config)
    )
    made = Processor(config, make_renderer(config, plugins), plugins)
    made.set_limits(RequestLimits(config, KVCacheConfig([], [])))
    return made


def image(offset, rows=2, fill=0, **changes):
    fields = {
        "modality": "image",
        "mm_identifier": f"id {fill}",
        "mm_position": PlaceholderRange(offset, rows + 1, [True] * rows + [False]),
        "data": {"pixels": Array.of(np.full((rows, 3), fill, np.float32))},
        "layout": {"rows": [rows]},
    }
    return MultiModalFeatureSpec(**{**fields, **changes})


def prompt(token_ids, *features):
    return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": list(features)}}


ONE = [1, IMAGE, IMAGE, END, 2]
TWO = [*ONE, IMAGE, IMAGE, END, 3]


def test_items_reach_the_engine():
    features = [image(1), image(5, fill=1)]
    message = processor().prepare("r", prompt(TWO, *features), SamplingParams(max_tokens=4)).message
    assert message.features == features
    assert message.cache_keys == [CacheKey(1, 4, "mm id 0"), CacheKey(5, 8, "mm id 1")]
    chat = (
        processor()
        .prepare_chat("r", [prompt(TWO, *features)], SamplingParams(max_tokens=4))
        .message
    )
    assert chat.features == features


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        ([image(2)], "image 1: its place"),
        ([image(7)], "image 1: it stands where"),
        ([image(-1)], "image 1: it stands where"),
        ([image(5), image(1)], "image 2: it stands where"),
        ([image(1), image(1)], "image 2: it stands where"),
        ([image(1, mm_position=PlaceholderRange(1, 0))], "image 1: it stands where"),
        ([image(1, mm_position=PlaceholderRange(1, 3, [True] * 2))], "image 1: it stands where"),
        ([image(1, mm_position=PlaceholderRange(1, 3))], "image 1: its place"),
        ([image(1, layout={})], "image 1: its place"),
        ([image(1, rows=3)], "image 1: its place"),
        ([image(1, mm_identifier="")], "image 1: its identifier"),
        ([image(1, mm_identifier="a" * 257)], "image 1: its identifier"),
        ([image(1, modality="video")], "video 1: this model takes no video, only image"),
        (
            [image(1), image(5, data={"pixels": Array.of(np.zeros(3))})],
            "image 2: its array must have 2 axes",
        ),
        ([image(1, data=None)], "image 1: it has no data"),
    ],
)
def test_items_that_are_not_as_the_rules_have_them(features, reason):
    with pytest.raises(RequestError, match=reason) as caught:
        processor().prepare("r", prompt(TWO, *features))
    assert caught.value.param == "multi_modal_data"


def test_items_that_the_engine_holds():
    made = processor()
    mirror = made.renderer.feature_cache = FeatureMirror(2**20)
    with mirror.sending([made.prepare("first", prompt(ONE, image(1))).message]):
        pass
    features = [image(1, data=None), image(5, fill=1)]
    assert (
        made.prepare("r", prompt(TWO, *features), SamplingParams(max_tokens=2)).message.features
        == features
    )
    for feature in (
        image(1, data=None, fill=1),
        image(1, data=None, layout={}),
        image(2, data=None),
    ):
        with pytest.raises(RequestError, match="image 1"):
            made.prepare("r", prompt(TWO, feature))


@pytest.mark.parametrize("is_held", [True, False])
def test_a_salt_separates_items_as_it_does_prefixes(is_held):
    """One tenant's items are neither found nor shared by another, so timing reveals nothing about
    them."""
    made = processor()
    mirror = made.renderer.feature_cache = FeatureMirror(2**20) if is_held else None

    def prepare(salt, **changes):
        given = prompt(ONE, image(1, **changes))
        chat = made.prepare_chat(
            "r", [given], SamplingParams(max_tokens=2), {"cache_salt": salt}
        ).message
        message = made.prepare(
            "r", given, SamplingParams(max_tokens=2), {"cache_salt": salt}
        ).message
        assert chat.features == message.features
        assert message.cache_keys == [
            *([CacheKey(0, 1, salt)] if salt else []),
            CacheKey(1, 4, f"mm {message.features[0].mm_identifier}"),
        ]
        return message

    messages = {salt: prepare(salt) for salt in ("a", "b", None)}
    names = {message.features[0].mm_identifier for message in messages.values()}
    assert len(names) == 3 and "id 0" in names
    assert prepare("a").features == messages["a"].features
    if mirror is None:
        return
    for salt in ("a", None):
        others = [one for one in messages if one != salt]
        with mirror.sending([messages[salt]]):
            pass
        assert prepare(salt, data=None).features[0].data is None
        for other in others:
            with pytest.raises(RequestError, match="it has no data"):
                prepare(other, data=None)
        mirror.forget([messages[salt].features[0].mm_identifier])


def test_what_is_held_is_told_no_renderer_elsewhere_of_a_tenant():
    mirror = FeatureMirror(2**20)
    seen = []
    made = processor()
    made.renderer.feature_cache = mirror
    with mirror.sending(
        [made.prepare("r", prompt(ONE, image(1)), SamplingParams(max_tokens=2)).message]
    ):
        pass
    for salt in ("a", None):
        PinnedRendering(lambda: Rendered([1], seen.append(mirror.held_keys(9))), salt)()
    assert seen == [[], ["id 0"]]


def test_items_of_a_tenant_are_rendered_again():
    made = processor()
    made.renderer.feature_cache = FeatureMirror(2**20)
    prepared = made.prepare(
        "r", prompt(ONE, image(1)), SamplingParams(max_tokens=2), {"cache_salt": "a"}
    )
    name = prepared.message.features[0].mm_identifier
    with made.renderer.feature_cache.sending([prepared.message]):
        pass
    assert prepared.message.features[0].data is None
    made.render_again(prepared)
    assert (
        prepared.message.features[0].data is not None,
        prepared.message.features[0].mm_identifier,
    ) == (True, name)


def test_a_cut_moves_items_and_cuts_none():
    params = SamplingParams(max_tokens=2, truncate_prompt_tokens=8)
    message = processor().prepare("r", prompt(TWO, image(1), image(5)), params).message
    assert message.prompt_token_ids == TWO[1:]
    assert [one.mm_position.offset for one in message.features] == [0, 4]
    for most in (4, 6, 1):
        with pytest.raises(RequestError, match="cut off an image") as caught:
            processor().prepare(
                "r", prompt(TWO, image(1), image(5)), SamplingParams(truncate_prompt_tokens=most)
            )
        assert caught.value.param == "truncate_prompt_tokens"
    whole = SamplingParams(max_tokens=2, truncate_prompt_tokens=20)
    assert processor().prepare("r", prompt(ONE, image(1)), whole).message.features == [image(1)]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            prompt([1, IMAGE, 2, IMAGE]),
            r"2 placeholders of modality 'image' \(token 9\) without an item; it has 0 items",
        ),
        ({"prompt_token_ids": [IMAGE]}, "1 placeholders .* 0 items"),
        (prompt(TWO, image(1)), "2 placeholders .* 1 items"),
        (prompt(TWO, image(5)), "2 placeholders .* 1 items"),
        (prompt([*TWO, IMAGE], image(1), image(5)), "1 placeholders .* 2 items"),
    ],
)
def test_each_placeholder_stands_for_an_item(given, told):
    made = processor()
    for prepare in (made.prepare, lambda name, one: made.prepare_chat(name, [one])):
        with pytest.raises(RequestError, match=f"^the prompt has {told}") as caught:
            prepare("r", given)
        assert caught.value.param == "multi_modal_data"
    # Tokens that are cut off still count.
    with pytest.raises(RequestError, match=told):
        made.prepare("r", given, SamplingParams(truncate_prompt_tokens=1))
    assert processor("Other").prepare("r", {"prompt_token_ids": [IMAGE]})


def test_a_model_without_rules_takes_no_items():
    with pytest.raises(RequestError, match="seer takes no images"):
        processor("Other").prepare("r", prompt(TWO, image(1)))


class NoRules:
    pass


def test_what_is_registered_must_be_rules():
    with pytest.raises(PluginError, match="MultiModalRules"):
        processor(rules="NoRules")
    with pytest.raises(PluginError, match="Missing"):
        processor(rules="Missing")


def test_prompts_with_media_must_be_asked_for():
    given = {
        "prompt": "a",
        "multi_modal_data": {"image": [1]},
        "mm_processor_kwargs": {"size": 2},
        "multi_modal_uuids": None,
    }
    with pytest.raises(RequestError, match="no images") as caught:
        parse_prompt(given)
    assert caught.value.param == "multi_modal_data"
    parsed = parse_prompt(given, media=True)
    assert parsed == {
        "prompt": "a",
        "multi_modal_data": {"image": [1]},
        "mm_processor_kwargs": {"size": 2},
    }
    assert parse_prompt({"prompt_token_ids": [1], "multi_modal_data": {}}) == {
        "prompt_token_ids": [1]
    }
    with pytest.raises(RequestError, match="no key 'images'"):
        parse_prompt({"prompt": "a", "images": [1]})
