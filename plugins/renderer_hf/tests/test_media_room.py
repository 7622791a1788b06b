"""Items of media that have no room in a prompt are refused before the work on them."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image
from seeing import LLAVA, QWEN, LlavaRules, QwenRules, train_newlines
from toolkit_lm.errors import ContextLengthError, RequestError
from toolkit_lm_renderer_hf import image_processor, media, video_processor

QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64},
    "patch_size": 14,
    "merge_size": 2,
}
CLIP = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}


@pytest.fixture
def make_seeing(make_renderer):
    def make(rules, max_model_len):
        qwen = rules is QwenRules
        files = {
            "chat_template.jinja": QWEN if qwen else LLAVA,
            "preprocessor_config.json": json.dumps(QWEN_IMAGES if qwen else CLIP),
        }
        renderer = make_renderer(train_newlines(), files=files, hf_config={"vocab_size": 400}, max_model_len=max_model_len)
        renderer.take_rules(rules(renderer.config))
        return renderer

    return make


@pytest.fixture
def processed(monkeypatch):
    """What is processed, and decoded, from here on."""
    seen = []
    for module in (image_processor, video_processor):
        run = module.run
        monkeypatch.setattr(module, "run", lambda *args, run=run: (seen.append("processed"), run(*args))[1])
    decode = media.open_image
    monkeypatch.setattr(media, "open_image", lambda *args, **more: (seen.append("decoded"), decode(*args, **more))[1])
    return seen


def file(seed, width=224, height=224):
    image = Image.new("P", (width, height))
    image.putpixel((seed, 0), 1)
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def chat(*images):
    return [{"role": "user", "content": [*({"type": "image", "image": one} for one in images), {"type": "text", "text": "a"}]}]


def test_pictures_stop_where_there_is_no_room_for_more(make_seeing, processed):
    """Each has 64 tokens: neither the third nor those after it are decoded."""
    made = make_seeing(QwenRules, 192)
    with pytest.raises(ContextLengthError, match=r"^image 3: it has 64 tokens, 192 with the items before it; .*192 tokens") as error:
        made.render_conversation(chat(*map(file, range(16))))
    assert error.value.param == "messages"
    assert processed == ["decoded", "processed"] * 2
    rendered = made.render_conversation(chat(file(0), file(1)))
    assert [one.mm_position.length for one in rendered.features] == [64, 64]


def test_the_same_picture_counts_as_often_as_it_stands_there(make_seeing, processed):
    with pytest.raises(ContextLengthError, match=r"^image 3: it has 64 tokens, 192 with"):
        make_seeing(QwenRules, 190).render_conversation(chat(*[file(0)] * 16))
    assert processed == ["decoded", "processed"]


@pytest.mark.parametrize(("width", "height"), [(224, 224), (30, 900), (1000, 700), (28, 28), (10, 10), (641, 77)])
def test_the_number_of_tokens_is_known_before(make_seeing, monkeypatch, width, height):
    """Of files and of pixels, and with the options of a request."""
    made = make_seeing(QwenRules, 4096)
    said = []
    monkeypatch.setattr(media.MediaReader, "_check_room", lambda self, total, count: said.append(count))
    for options in (None, {"max_pixels": 28 * 28 * 9}):
        for source in (file(0, width, height), np.zeros((height, width, 3), np.uint8)):
            made.render_conversation(chat(source), mm_processor_kwargs=options)
    assert said[::2] == said[1::2]
    assert len(said) == 8


def test_pictures_of_one_size_are_counted_one_by_one(make_seeing, processed):
    with pytest.raises(ContextLengthError, match=r"^image 3: it has 4 tokens, 12 with the items before it"):
        make_seeing(LlavaRules, 12).render_conversation(chat(*map(file, range(16))))
    assert processed == ["decoded", "processed"] * 3


def test_what_the_engine_holds_counts(make_seeing):
    made = make_seeing(QwenRules, 192)
    found = made.render_conversation(chat(file(0))).features[0]
    held = type("Held", (), {"get": lambda self, name: media.Replacement([9] * 64) if name == found.mm_identifier else None})()
    made.feature_cache = held
    with pytest.raises(ContextLengthError, match=r"^image 2: it has 64 tokens, 128 with"):
        make_seeing(QwenRules, 128).render_conversation(chat(file(0), file(0)))
    with pytest.raises(ContextLengthError, match=r"^image 3: "):
        made.render_conversation(chat(*[file(0)] * 3))


def test_a_video_is_counted_before_it_is_processed(make_seeing, processed):
    frames = np.zeros((8, 224, 224, 3), np.uint8)
    part = {"type": "video", "video": frames}
    made = make_seeing(QwenRules, 4 * 64)
    with pytest.raises(ContextLengthError, match=r"^video 1: it has 256 tokens; "):
        made.render_conversation([{"role": "user", "content": [part]}])
    assert processed == []


def test_in_a_plain_prompt(make_seeing):
    made = make_seeing(QwenRules, 64)
    with pytest.raises(ContextLengthError, match=r"^image 1: it has 64 tokens") as error:
        made.render_prompt({"prompt": "<|image_pad|>", "multi_modal_data": {"image": file(0)}})
    assert error.value.param == "multi_modal_data"


def test_a_picture_that_is_too_narrow_is_refused_as_before(make_seeing):
    with pytest.raises(RequestError, match=r"^image 1: it has 1 x 900 pixels; a side may be"):
        make_seeing(QwenRules, 4096).render_conversation(chat(file(0, 1, 900)))
