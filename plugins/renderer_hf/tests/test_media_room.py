"""Items of media that have no room in a prompt are refused before the work on them."""

from __future__ import annotations

import io
import json
from base64 import b64encode

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
CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
}


@pytest.fixture
def make_seeing(make_renderer):
    def make(rules, max_model_len, **stated):
        qwen = rules is QwenRules
        files = {
            "chat_template.jinja": QWEN if qwen else LLAVA,
            "preprocessor_config.json": json.dumps((QWEN_IMAGES if qwen else CLIP) | stated),
        }
        renderer = make_renderer(
            train_newlines(),
            files=files,
            hf_config={"vocab_size": 400},
            max_model_len=max_model_len,
        )
        renderer.set_rules(rules(renderer.config))
        return renderer

    return make


@pytest.fixture
def processed(monkeypatch):
    """Items processed and decoded from here on."""
    seen = []
    for module in (image_processor, video_processor):
        run = module.run
        monkeypatch.setattr(
            module, "run", lambda *args, run=run: (seen.append("processed"), run(*args))[1]
        )
    decode = media.open_image
    monkeypatch.setattr(
        media,
        "open_image",
        lambda *args, **more: (seen.append("decoded"), decode(*args, **more))[1],
    )
    return seen


def file(seed, width=224, height=224, kind="PNG", **options):
    image = Image.new("P", (width, height))
    image.putpixel((seed, 0), 1)
    data = io.BytesIO()
    (image.convert("RGB") if kind == "JPEG" else image).save(data, kind, **options)
    return data.getvalue()


def chat(*images):
    return [
        {
            "role": "user",
            "content": [
                *({"type": "image", "image": one} for one in images),
                {"type": "text", "text": "a"},
            ],
        }
    ]


def test_pictures_stop_where_there_is_no_room_for_more(make_seeing, processed):
    """Each has 64 tokens: neither the third nor those after it are decoded."""
    made = make_seeing(QwenRules, 192)
    with pytest.raises(
        ContextLengthError,
        match=r"^image 3: it has 64 tokens, 192 with the items before it; .*192 tokens",
    ) as error:
        made.render_conversation(chat(*map(file, range(16))))
    assert error.value.param == "messages"
    assert processed == ["decoded", "processed"] * 2
    rendered = made.render_conversation(chat(file(0), file(1)))
    assert [one.mm_position.length for one in rendered.features] == [64, 64]


def test_the_same_picture_counts_as_often_as_it_stands_there(make_seeing, processed):
    with pytest.raises(ContextLengthError, match=r"^image 3: it has 64 tokens, 192 with"):
        make_seeing(QwenRules, 190).render_conversation(chat(*[file(0)] * 16))
    assert processed == ["decoded", "processed"]


@pytest.mark.parametrize(
    ("width", "height"), [(224, 224), (30, 900), (1000, 700), (28, 28), (10, 10), (641, 77)]
)
def test_the_number_of_tokens_is_known_before(make_seeing, monkeypatch, width, height):
    """Number of tokens of files and of pixels, and with the options of a request."""
    made = make_seeing(QwenRules, 4096)
    said = []
    monkeypatch.setattr(
        media.MediaReader, "_check_room", lambda self, total, count: said.append(count)
    )
    for options in (None, {"max_pixels": 28 * 28 * 9}):
        for source in (file(0, width, height), np.zeros((height, width, 3), np.uint8)):
            made.render_conversation(chat(source), mm_processor_kwargs=options)
    assert said[::2] == said[1::2]
    assert len(said) == 8


def test_pictures_of_one_size_are_counted_one_by_one(make_seeing, processed):
    with pytest.raises(
        ContextLengthError, match=r"^image 3: it has 4 tokens, 12 with the items before it"
    ):
        make_seeing(LlavaRules, 12).render_conversation(chat(*map(file, range(16))))
    assert processed == ["decoded", "processed"] * 3


def test_what_the_engine_holds_counts(make_seeing):
    made = make_seeing(QwenRules, 192)
    found = made.render_conversation(chat(file(0))).features[0]
    held = type(
        "Held",
        (),
        {
            "get": lambda self, name: (
                media.Replacement([9] * 64) if name == found.mm_identifier else None
            )
        },
    )()
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


# Refusals before any work is done


def url(data):
    return f"data:image/png;base64,{b64encode(data).decode()}"


def of(source, kind="image_url", **more):
    return {"type": kind, kind: {"url": source} if kind.endswith("url") else source, **more}


BOMB = file(0, 3584, 3584)
MOST = 36_000_000
"""Pixels that the operator lets in, by default."""


def test_an_image_is_what_its_pixels_can_become(make_seeing):
    """294 MiB of arrays of a file of two KiB, where the checkpoint and the length allow it."""
    assert len(BOMB) < 16_000
    made = make_seeing(QwenRules, 2**16, size={"shortest_edge": 3136, "longest_edge": 3584 * 3584})
    assert made.media_size(of(url(BOMB)), {}) == (3584 * 3584 * 24, 3584 * 3584 * 3)
    assert made.media_size(of(url(file(0))), {}) == (224 * 224 * 24, 224 * 224 * 3)
    assert made.media_size(of(url(file(0, 28, 28))), {})[0] == 3136 * 24
    assert made.media_size(of(url(BOMB)), {"max_pixels": 28 * 28 * 4})[0] == 28 * 28 * 4 * 24
    assert (
        made.media_size(of(url(BOMB)), {"size": {"longest_edge": 28 * 28 * 4, "shortest_edge": 1}})[
            0
        ]
        == 28 * 28 * 4 * 24
    )
    # A shorter prompt has no room for it.
    assert (
        make_seeing(QwenRules, 1024, size={"longest_edge": 3584 * 3584}).media_size(
            of(url(BOMB)), {}
        )[0]
        == 1024 * 28 * 28 * 24
    )
    # These are resized to one size, whatever they have.
    assert make_seeing(LlavaRules, 1024).media_size(of(url(BOMB)), {}) == (
        28 * 28 * 12,
        3584 * 3584 * 3,
    )


def test_what_is_said_is_no_less_than_what_is_made(make_seeing):
    for rules, stated in (
        (QwenRules, {"size": {"shortest_edge": 3136, "longest_edge": 28 * 28 * 100}}),
        (LlavaRules, {}),
    ):
        made = make_seeing(rules, 2**16, **stated)
        for width, height in ((224, 224), (28, 28), (644, 84), (2000, 1500)):
            data = file(0, width, height)
            [feature] = made.render_conversation(chat(data)).features
            size = sum(
                one.data.nbytes for name, one in feature.data.items() if name == "pixel_values"
            )
            assert size <= made.media_size(of(data, "image"), {})[0] <= 1.2 * size


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_the_size_is_read_of_the_beginning(make_seeing, kind):
    made = make_seeing(LlavaRules, 64)
    data = file(0, 1000, 600, kind)
    sources = [
        of(url(data)),
        of(url(data), "image"),
        of(data, "image"),
        of(bytearray(data), "image"),
    ]
    sources += [
        of(Image.new("RGB", (1000, 600)), "image"),
        {"type": "image_url", "image_url": url(data)},
    ]
    noise = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (600, 1000, 3), np.uint8)).save(
        noise, kind
    )
    assert len(noise.getvalue()) > 2**18
    sources += [of(url(noise.getvalue())), of(noise.getvalue(), "image")]
    assert {made.media_size(source, {})[1] for source in sources} == {1000 * 600 * 3}


def test_what_cannot_be_told_counts_as_the_most(make_seeing):
    made = make_seeing(LlavaRules, 64)
    late = file(
        0, 1000, 600, "JPEG", exif=b"Exif\x00\x00" + bytes(60_000), icc_profile=bytes(60_000)
    )
    for source in (
        "http://here/a.png",
        url(b"nothing"),
        url(late),
        "data:image/png;base64,A",
        "data:;base64",
        "",
        url(file(0))[5:],
    ):
        assert made.media_size(of(source), {}) == (28 * 28 * 12, MOST * 3)
    for stated in (
        {"size": 5, "crop_size": None},
        {"crop_size": {"height": "a"}},
        {"crop_size": -5},
        {"crop_size": {"height": 2**30}},
    ):
        assert (
            make_seeing(LlavaRules, 64, **stated).media_size(of(url(file(0))), {})[0] == MOST * 12
        )
    odd = make_seeing(
        QwenRules, 2**16, patch_size="a", size={"longest_edge": "a"}, temporal_patch_size=None
    )
    assert odd.media_size(of("http://here"), {"max_pixels": "a", "size": 5})[0] == MOST * 24
    assert make_seeing(QwenRules, 64).media_size(of("data:", "video_url"), {}) == (
        64 * 28 * 28 * 2 * 12,
        0,
    )
    assert make_seeing(QwenRules, 2**16).media_size(of("data:", "video"), {}) == (MOST * 12, 0)


def test_what_is_refused_takes_nothing(make_seeing, make_renderer):
    made = make_seeing(LlavaRules, 64)
    embeds = {"embeds": np.zeros((4, 6), np.float32)}
    for part in (
        of(embeds, "image_embeds"),
        of(embeds, "image"),
        {"type": "image_url"},
        {"type": "file"},
        {"type": ["image"]},
        {"type": 5},
    ):
        assert made.media_size(part, {}) == (0, 0)
    assert make_renderer(train_newlines()).media_size(of("http://here"), {}) == (0, 0)
