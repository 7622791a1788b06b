"""Items of media: what is read of them and refused, and what stands for them in a prompt."""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
import time
import zlib

import msgspec
import numpy as np
import pytest
from PIL import Image
from seeing import HIDDEN, LLAVA, QWEN, LlavaRules, QwenRules, token, train_newlines
from toolkit_lm.errors import CheckpointError, ConfigError, RequestError
from toolkit_lm.renderer.feature_lookup import HeldFeature
from toolkit_lm_renderer_hf.embeds import encode_array
from toolkit_lm_renderer_hf.image_processor import ImageProcessor

CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
}
QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16},
    "patch_size": 14,
    "merge_size": 2,
}
STRINGS = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"
IMAGE = token("<image>")


@pytest.fixture(scope="module")
def tokenizer():
    return train_newlines()


@pytest.fixture
def make_seeing(tokenizer, make_renderer):
    def make(rules=LlavaRules, template=None, images=None, **options):
        found = images or (QWEN_IMAGES if rules is QwenRules else CLIP)
        files = {
            "chat_template.jinja": template or (QWEN if rules is QwenRules else LLAVA),
            "preprocessor_config.json": json.dumps(found),
        }
        renderer = make_renderer(tokenizer, files=files, hf_config={"vocab_size": 400}, **options)
        renderer.set_rules(rules(renderer.config))
        return renderer

    return make


@pytest.fixture
def llava(make_seeing):
    return make_seeing()


@pytest.fixture
def qwen(make_seeing):
    return make_seeing(QwenRules)


def pixels(seed=0, width=40, height=30):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def file_of(image, kind="PNG"):
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, kind)
    return file.getvalue()


def data_url(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def chat(*parts):
    return [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": part} if isinstance(part, str) else part for part in parts
            ],
        }
    ]


def of(source, **more):
    return {"type": "image", "image": source, **more}


def values(feature):
    return feature.data["pixel_values"].to_numpy()


class Held:
    """A cache of what an engine holds."""

    def __init__(self):
        self.asked = []
        self.held = {}

    def get(self, identifier):
        self.asked.append(identifier)
        return self.held.get(identifier)

    def take(self, rendered):
        for one in rendered.features:
            at = one.mm_position
            self.held[one.mm_identifier] = HeldFeature(
                rendered.token_ids[at.offset : at.end], at.mask, one.layout, 1
            )


# Sources


def test_an_image_is_the_same_however_it_comes(llava):
    image = pixels()
    file = file_of(image)
    sources = [
        {"type": "image_url", "image_url": {"url": data_url(file), "detail": "low"}},
        {"type": "image_url", "image_url": data_url(file)},
        *map(
            of,
            (
                data_url(file),
                file,
                bytearray(file),
                image,
                Image.fromarray(image),
                Image.open(io.BytesIO(file)),
                np.moveaxis(image, 2, 0),
            ),
        ),
        {"type": "image", "url": data_url(file)},
        of(Image.fromarray(image).convert("RGBA")),
        of(np.concatenate([image, np.full((30, 40, 1), 255, np.uint8)], 2)),
    ]
    rendered = llava.render_conversation(chat(*sources))
    assert rendered.token_ids.count(IMAGE) == 4 * len(sources)
    for feature in rendered.features:
        np.testing.assert_array_equal(values(feature), values(rendered.features[0]))
    identifiers = [feature.mm_identifier for feature in rendered.features]
    # Files are known by their bytes, pixels by themselves and their mode.
    assert len(set(identifiers)) == 3
    assert (
        len({identifiers[n] for n in (0, 1, 2, 3, 4, 9)})
        == len({identifiers[n] for n in (5, 6, 7, 8)})
        == 1
    )


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_an_uploaded_file_is_what_its_bytes_are(llava, kind):
    file = file_of(pixels(), kind)
    plain = base64.b64encode(file).decode()
    for data in (f"data:application/octet-stream;base64,{plain}", plain, file):
        part = {"type": "file", "file": {"filename": "a.mp4", "file_data": data}, "uuid": "a"}
        rendered = llava.render_conversation(chat("a", part, of(file, uuid="a")))
        assert rendered.features[0].mm_identifier == rendered.features[1].mm_identifier
        assert llava.media_size(part, {}) == llava.media_size(of(file), {}) != (0, 0)


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGBA", "LA", "CMYK", "I;16", "F"])
def test_modes_of_pillow(llava, mode):
    before = {"I;16": "L", "F": "L", "LA": "RGB"}.get(mode, mode)
    image = Image.fromarray(pixels()).convert(before).convert(mode)
    if mode == "P":
        image.info["transparency"] = b"\x00\x80"
    feature = llava.render_conversation(chat(of(image))).features[0]
    assert values(feature).shape == (1, 3, 28, 28)


def test_identifiers_are_of_content_and_of_what_is_made_of_it(qwen, make_seeing):
    image = pixels(0, 112, 112)

    def identifier(renderer=qwen, source=image, **options):
        uuid = options.pop("uuid", None)
        return (
            renderer.render_conversation(chat(of(source, uuid=uuid)), **options)
            .features[0]
            .mm_identifier
        )

    one = identifier()
    assert one == identifier() and len(one) == 64
    turned = np.ascontiguousarray(image.reshape(56, 224, 3))
    others = [
        identifier(source=pixels(1, 112, 112)),
        identifier(source=turned),
        identifier(source=Image.fromarray(image).convert("RGBA")),
        identifier(source=file_of(image)),
        identifier(mm_processor_kwargs={"max_pixels": 28 * 28 * 4}),
        identifier(uuid="mine"),
        identifier(uuid="yours"),
        identifier(make_seeing(QwenRules, images=QWEN_IMAGES | {"image_mean": [0.1, 0.2, 0.3]})),
    ]
    assert len({one, *others}) == 1 + len(others)


def test_a_name_stands_for_no_other_content(llava):
    """Equal names of unlike images share nothing: a caller's name is never trusted."""
    both = llava.render_conversation(
        chat(of(pixels(0), uuid="a"), of(pixels(1), uuid="a"))
    ).features
    assert both[0].mm_identifier != both[1].mm_identifier
    with pytest.raises(
        RequestError, match="image 1: a content part of type 'image_url' must have 'image_url'"
    ):
        llava.render_conversation(chat({"type": "image_url", "image_url": None}))
    for uuid in ("", "a" * 257, 3):
        with pytest.raises(RequestError, match="image 1: its uuid must be a text"):
            llava.render_conversation(chat(of(pixels(), uuid=uuid)))


def test_options_make_images_smaller_only(qwen):
    def grid(**options):
        return (
            qwen.render_conversation(chat(of(pixels(0, 112, 112))), mm_processor_kwargs=options)
            .features[0]
            .layout["grid_thw"]
        )

    assert grid() == [1, 8, 8]
    assert grid(max_pixels=28 * 28 * 4) == grid(size={"longest_edge": 28 * 28 * 4}) == [1, 4, 4]
    assert grid(min_pixels=28 * 28 * 16) == [1, 8, 8]
    prompt = {
        "prompt": "<|image_pad|>",
        "multi_modal_data": {"image": pixels(0, 112, 112)},
        "mm_processor_kwargs": {"max_pixels": 3136},
    }
    assert qwen.render_prompt(prompt).features[0].layout == {"grid_thw": [1, 4, 4]}


@pytest.mark.parametrize(
    "options",
    [
        {"max_pixels": 28 * 28 * 17},
        {"size": {"longest_edge": 10**9}},
        {"max_pixels": 0},
        {"max_pixels": 784.0},
        {"max_pixels": True},
        {"size": {"height": 3}},
        {"size": 4},
        {"do_resize": False},
        {"return_tensors": "pt"},
        {3: 4},
        [],
        "size",
    ],
    ids=repr,
)
def test_options_that_a_request_cannot_set(qwen, options):
    if options == []:
        options = [1]
    with pytest.raises(RequestError, match="mm_processor_kwargs") as caught:
        qwen.render_conversation(chat(of(pixels())), mm_processor_kwargs=options)
    assert caught.value.param == "mm_processor_kwargs"


# Templates and placeholders


def test_order_is_kept_in_templates_of_strings(make_seeing, tokenizer):
    made = make_seeing(template=STRINGS)
    rendered = made.render_conversation(
        chat("a", of(pixels(0)), "b", of(pixels(1)), of(pixels(2)), "c")
    )
    text = "user: a\n<image>\nb\n<image>\n<image>\nc\n".replace("<image>", "<image>" * 4)
    assert made.decode(rendered.token_ids) == text
    for seed, feature in enumerate(rendered.features):
        alone = made.render_conversation(chat(of(pixels(seed)))).features[0]
        assert feature.mm_identifier == alone.mm_identifier
        assert (
            rendered.token_ids[feature.mm_position.offset : feature.mm_position.end] == [IMAGE] * 4
        )


def places(token_ids):
    return [place for place, one in enumerate(token_ids) if one == IMAGE]


def test_templates_of_strings_get_what_surrounds_a_placeholder(make_seeing):
    made = make_seeing(QwenRules, STRINGS)
    rendered = made.render_conversation(chat("a", of(pixels(0, 28, 28))))
    assert (
        made.decode(rendered.token_ids) == "user: a\n<|vision_start|><|image_pad|><|vision_end|>\n"
    )


def test_templates_of_parts_that_know_no_media(make_seeing):
    made = make_seeing(template=PARTS)
    rendered = made.render_conversation(chat("a", of(pixels(0)), "b"))
    assert made.decode(rendered.token_ids) == "a" + "<image>" * 4 + "b"


def test_a_template_that_drops_images_is_refused(make_seeing):
    made = make_seeing(
        template=LLAVA.replace("{% for m in messages %}", "{% for m in messages[-1:] %}")
    )
    with pytest.raises(
        RequestError,
        match="the prompt has 1 placeholders '<image>' for 2 items of modality 'image'",
    ):
        made.render_conversation([*chat(of(pixels())), *chat(of(pixels()))])


@pytest.mark.parametrize("template", [LLAVA, STRINGS], ids=["parts", "strings"])
def test_typed_placeholders_stay_text(make_seeing, tokenizer, template):
    made = make_seeing(template=template)
    words = "What is <image>? <image><image>"
    rendered = made.render_conversation(chat(words, of(pixels()), "<image>"))
    assert places(rendered.token_ids) == list(
        range(rendered.features[0].mm_position.offset, rendered.features[0].mm_position.end)
    )
    # In text they are several tokens, and decoding returns them unchanged.
    assert rendered.token_ids.count(IMAGE) == 4
    text = made.decode(rendered.token_ids)
    assert words in text and text.count("<image>") == 8
    plain = [
        {"role": "user", "content": "a <image> b", "name": "<image>"},
        {"role": "assistant", "content": "<image>"},
    ]
    alone = made.render_conversation(plain)
    assert alone.features is None and IMAGE not in alone.token_ids
    assert "a <image> b" in made.decode(alone.token_ids)
    # The special tokens of the template are there as ever.
    assert (alone.token_ids.count(token("<|im_end|>")) == 2) == (template is LLAVA)


def test_typed_placeholders_of_both_modalities_and_elsewhere(make_seeing):
    template = QWEN + "{% if tools %}{{ tools | tojson }}{% endif %}{{ note }}"
    made = make_seeing(QwenRules, template)
    tools = [
        {
            "type": "function",
            "function": {"name": "<|image_pad|>", "parameters": {"<|video_pad|>": {}}},
        }
    ]
    chat_of = chat("<|video_pad|>\n", of(pixels(0, 56, 56)), "<|image_pad|>")
    rendered = made.render_conversation(
        chat_of, tools=tools, chat_template_kwargs={"note": "<|image_pad|>"}
    )
    assert rendered.token_ids.count(token("<|image_pad|>")) == 4
    assert rendered.token_ids.count(token("<|video_pad|>")) == 0
    text = made.decode(rendered.token_ids)
    assert text.count("<|image_pad|>") == 4 + 3 and text.count("<|video_pad|>") == 2


def test_a_placeholder_made_of_two_parts_is_refused(make_seeing):
    made = make_seeing(template=LLAVA)
    with pytest.raises(RequestError, match="2 placeholders '<image>' for 1 items"):
        made.render_conversation(chat("<ima", "ge>", of(pixels())))


def test_a_final_message_is_continued(llava):
    messages = [*chat(of(pixels()), "<image>"), {"role": "assistant", "content": "It is <image>"}]
    rendered = llava.render_conversation(messages, continue_final_message=True)
    assert llava.decode(rendered.token_ids).endswith("assistant\nIt is <image>")
    with pytest.raises(RequestError, match="ends with a text"):
        llava.render_conversation(chat("a", of(pixels())), continue_final_message=True)


def test_prompts_with_wrong_numbers_of_placeholders(llava):
    for prompt, many in (
        ("a", [pixels()]),
        ("<image><image>", [pixels()]),
        ("<image>", [pixels(), pixels(1)]),
    ):
        for given in ({"prompt": prompt}, llava.render_prompt(prompt).token_ids):
            whole = {
                **(given if isinstance(given, dict) else {"prompt_token_ids": given}),
                "multi_modal_data": {"image": many},
            }
            with pytest.raises(RequestError, match="it must have one for each") as caught:
                llava.render_prompt(whole)
            assert caught.value.param == "multi_modal_data"


def test_prompts_of_several_forms(llava):
    image = pixels()
    given = [
        {"prompt": "<image>", "multi_modal_data": {"image": image}},
        {"prompt": "<image>", "multi_modal_data": {"image": [image]}, "multi_modal_uuids": None},
        {
            "prompt": "<image>",
            "multi_modal_data": {"image": (Image.fromarray(image),)},
            "multi_modal_uuids": {},
        },
        {
            "prompt_token_ids": [IMAGE],
            "multi_modal_data": {"image": image},
            "mm_processor_kwargs": {},
        },
    ]
    rendered = [llava.render_prompt(one) for one in given]
    assert all(one.token_ids == [IMAGE] * 4 for one in rendered)
    assert len({one.features[0].mm_identifier for one in rendered}) == 1
    named = llava.render_prompt({**given[0], "multi_modal_uuids": {"image": "a"}})
    assert named.features[0].mm_identifier != rendered[0].features[0].mm_identifier
    plain = llava.render_prompt({"prompt": "<image> a", "multi_modal_data": {"image": []}})
    assert plain.features is None


# Data that the engine holds


def test_what_is_held_is_neither_decoded_nor_processed(llava, monkeypatch):
    llava.feature_cache = held = Held()
    before = llava.media_lookups
    file = file_of(pixels())
    image = pixels(1)
    messages = chat("a", of(file), of(image), of(file))
    first = llava.render_conversation(messages)
    assert all(one.data is not None for one in first.features)
    assert len(set(held.asked)) == len(held.asked) == 2
    held.take(first)
    monkeypatch.setattr(ImageProcessor, "process", None)
    monkeypatch.setattr("toolkit_lm_renderer_hf.media.open_image", None)
    again = llava.render_conversation(messages)
    assert again.token_ids == first.token_ids
    assert [one.data for one in again.features] == [None] * 3
    assert [msgspec.structs.replace(one, data=None) for one in first.features] == again.features
    asked, found = (now - old for now, old in zip(llava.media_lookups, before, strict=True))
    assert (asked, found) == (4, 2), "two items, twice"


# Refusals


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"no picture at all", "not a picture of a known format"),
        (file_of(pixels(0, 200, 200))[:20000], "broken or truncated PNG"),
        (file_of(pixels(0, 200, 200), "JPEG")[:9000], "broken or truncated JPEG"),
        (file_of(pixels(0, 8, 8), "TIFF"), "not a picture of a known format"),
        (b"", "is empty"),
        ("data:image/png;base64,!!!", "base64 is broken"),
        ("/etc/passwd", "none of a data URL"),
        ("file:///etc/passwd", "none of a data URL"),
        ("http://127.0.0.1/a.png", "not allowed"),
        (np.zeros((4, 4, 3), np.float32), "must be uint8"),
        (np.zeros((5, 4, 5), np.uint8), "must be uint8"),
        (np.zeros((0, 4, 3), np.uint8), "must be uint8"),
        (np.zeros((1, 4, 4, 3), np.uint8), "must be uint8"),
        (np.zeros((201, 1, 3), np.uint8), "200 times"),
        (3, "not a int"),
        (object(), "not a object"),
    ],
    ids=lambda value: type(value).__name__ if type(value) is object else repr(value)[:30],
)
def test_images_that_cannot_be_read(llava, source, reason):
    with pytest.raises(RequestError, match=f"^image 2: .*{reason}") as caught:
        llava.render_conversation(chat(of(pixels()), of(source)))
    assert caught.value.param == "messages"
    assert "passwd" not in str(caught.value)
    with pytest.raises(RequestError, match=f"^image 2: .*{reason}") as caught:
        llava.render_prompt(
            {"prompt": "<image><image>", "multi_modal_data": {"image": [pixels(), source]}}
        )
    assert caught.value.param == "multi_modal_data"


def test_what_the_processor_refuses(make_seeing):
    class Any(LlavaRules):
        def replacement(self, modality, data):
            raise RequestError("it is not square.")

    with pytest.raises(RequestError, match=r"image 1: it is not square\."):
        make_seeing(Any).render_conversation(chat(of(pixels())))
    narrow = QWEN_IMAGES | {"size": {"shortest_edge": 1, "longest_edge": 1}}
    with pytest.raises(RequestError, match="image 1: the checkpoint's processor cannot read it"):
        make_seeing(QwenRules, images=narrow | {"patch_size": 0}).render_conversation(
            chat(of(pixels()))
        )


def test_bombs(make_seeing):
    """A file, a message and a resize that would become too large are refused before they do."""
    made = make_seeing(max_media_pixels=10_000, max_media_bytes=100_000)
    row = zlib.compress(bytes(1 + 3 * 60_000))
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", row), (b"IEND", b"")]
    bomb = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks
    )
    lazy = Image.new("L", (1, 1))
    lazy._size = (60_000, 60_000)
    start = time.process_time()
    for source, reason in (
        (bomb, "more than the 10000"),
        (data_url(bomb), "more than the 10000"),
        (pixels(0, 101, 100), "max_media_pixels"),
        (lazy, "max_media_pixels"),
        (bytes(100_001), "more than the"),
        (data_url(bytes(100_001)), "holds more than"),
        (np.zeros((1, 190, 3), np.uint8), "resized to more than 10000"),
    ):
        with pytest.raises(RequestError, match=f"image 1: .*{reason}"):
            made.render_conversation(chat(of(source)))
    assert time.process_time() - start < 5


def test_numbers_of_items(make_seeing):
    made = make_seeing(limit_mm_per_prompt=["image=2"])
    two = chat(of(pixels()), of(pixels()))
    assert len(made.render_conversation(two).features) == 2
    with pytest.raises(RequestError, match="image 3: there are 3; a prompt may have 2") as caught:
        made.render_conversation([*two, *chat(of(b"unread"))])
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="image 3"):
        made.render_prompt(
            {"prompt": "<image>" * 3, "multi_modal_data": {"image": [b"unread"] * 3}}
        )
    with pytest.raises(RequestError, match="image 17: there are 99"):
        make_seeing().render_conversation(chat(*[of(b"unread")] * 99))
    with pytest.raises(RequestError, match="image 1: there are 1; a prompt may have 0"):
        make_seeing(limit_mm_per_prompt=["image=0"]).render_conversation(chat(of(pixels())))


@pytest.mark.parametrize("limit", ["image", "image=", "image=-1", "audio=2", "image=1.5", "=3"])
def test_limits_that_make_no_sense(make_seeing, limit):
    with pytest.raises(ConfigError, match="limit_mm_per_prompt"):
        make_seeing(limit_mm_per_prompt=[limit])


def test_bounds_that_make_no_sense(make_seeing):
    with pytest.raises(ConfigError, match="max_pixels"):
        make_seeing(max_media_pixels=10**9)
    with pytest.raises(ConfigError, match="not a host"):
        make_seeing(allowed_media_hosts=["http://a/b"])


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (
            {"type": "video_url", "video_url": {"url": "http://a"}},
            "video 1: this model takes no video, only image",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            "audio 1: this model takes no audio",
        ),
        (
            {"type": "image_url", "image_url": {}},
            "image 1: a content part of type 'image_url' must have",
        ),
        ({"type": "image_url"}, "image 1: a content part"),
        ({"type": "image"}, "image 1: a content part"),
        ({"type": "file"}, "item 1, file: a content part of type 'file' must have 'file'"),
        ({"type": "file", "file": {"filename": "a.png"}}, "item 1, file: it must have file_data"),
        ({"type": "file", "file": {"file_data": 3}}, "item 1, file: it must have file_data"),
        (
            {"type": "file", "file": {"file_id": "file-1"}},
            "item 1, file: no files are kept here: give file_data",
        ),
        (
            {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0xLjcK"}},
            "item 1, file: it is of no known format",
        ),
        (
            {"type": "file", "file": {"file_data": "!" * 100_000}},
            "item 1, file: it is of no known format",
        ),
        (
            {"type": "file", "file": {"file_data": "data:;base64,UklGRgAAAABXQVZF"}},
            "audio 1: this model takes no audio",
        ),
        (
            {"type": "file", "file": {"file_data": "data:;base64,AAAAIGZ0eXBpc29t"}},
            "video 1: this model takes no video",
        ),
        ({"type": ["image"]}, "text and image, not content of type"),
        ("image", "not content"),
        (3, "not content"),
    ],
    ids=repr,
)
def test_parts_that_are_refused(llava, part, reason):
    with pytest.raises(RequestError, match=reason):
        llava.render_conversation([{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    "given",
    [
        {"multi_modal_data": [1]},
        {"multi_modal_data": {3: 4}},
        {"multi_modal_uuids": {"image": ["a", "b"]}},
    ],
)
@pytest.mark.parametrize("extra", [{}])
def test_prompts_with_malformed_media(llava, given, extra):
    with pytest.raises(RequestError, match="multi_modal_"):
        llava.render_prompt(
            {"prompt": "<image>", "multi_modal_data": {"image": pixels()}, **given, **extra}
        )


def test_a_model_without_rules_takes_no_images(tokenizer, make_renderer):
    plain = make_renderer(
        tokenizer, files={"chat_template.jinja": LLAVA}, hf_config={"vocab_size": 400}
    )
    with pytest.raises(
        RequestError, match="this model takes text only, not content of type 'image_url'"
    ):
        plain.render_conversation(chat({"type": "image_url", "image_url": {"url": "a"}}))
    with pytest.raises(RequestError, match="no images"):
        plain.render_prompt({"prompt": "<image>", "multi_modal_data": {"image": pixels()}})
    with pytest.raises(RequestError, match="no images"):
        plain.render_conversation(chat("a"), mm_processor_kwargs={"size": 3})


# Embeddings


def test_embeddings_stand_for_an_image(llava):
    import torch

    rows = np.random.default_rng(0).normal(size=(4, HIDDEN)).astype(np.float32)
    coded = json.loads(json.dumps(encode_array(rows)))
    sources = [
        rows,
        torch.from_numpy(rows),
        rows[None],
        {"embeds": rows},
        {"image_embeds": coded},
        coded,
        rows.astype(">f4"),
    ]
    rendered = llava.render_conversation(
        chat(*({"type": "image_embeds", "image_embeds": one} for one in sources))
    )
    for feature in rendered.features:
        np.testing.assert_array_equal(feature.data["embeds"].to_numpy(), rows)
        llava.rules.check(feature, rendered.token_ids)
    assert len({one.mm_identifier for one in rendered.features}) == 1
    beside = llava.render_prompt(
        {"prompt": "<image><image>", "multi_modal_data": {"image": [rows, pixels()]}}
    )
    assert [list(one.data) for one in beside.features] == [["embeds"], ["pixel_values"]]
    half = torch.from_numpy(rows).bfloat16()
    feature = llava.render_conversation(
        chat({"type": "image_embeds", "image_embeds": half})
    ).features[0]
    np.testing.assert_array_equal(feature.data["embeds"].to_numpy(), half.float().numpy())


def test_embeddings_with_a_grid(qwen):
    rows = np.zeros((4, HIDDEN), np.float32)
    for modality in ("image", "video"):
        given = {f"{modality}_embeds": rows, f"{modality}_grid_thw": [[1, 4, 4]]}
        feature = qwen.render_conversation(
            chat({"type": f"{modality}_embeds", f"{modality}_embeds": given})
        ).features[0]
        assert feature.layout == {"grid_thw": [1, 4, 4]} and feature.modality == modality


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (np.zeros((3, HIDDEN), np.float32), "embeds must have the shape"),
        (np.full((4, HIDDEN), np.nan, np.float32), "not finite"),
        (np.zeros((4, HIDDEN), np.int64), "must be floats"),
        (np.zeros((2, 4, HIDDEN), np.float32), "must be floats of the shape"),
        (np.zeros((0, HIDDEN), np.float32), "must be floats of the shape"),
        ("UEsDBA==", "must be arrays of numbers"),
        (np.array([["a"]]), "must be arrays of numbers"),
        ({"other": np.zeros(3)}, "must be floats of the shape"),
        ({str(n): np.zeros(1) for n in range(9)}, "9 arrays"),
        ({"embeds": np.zeros((4, HIDDEN)), "grid": [[1, 2], [3]]}, "rows of one length"),
        ({"embeds": np.zeros((4, HIDDEN)), "grid": [1.5]}, "at most 64 integers"),
        ({"embeds": np.zeros((4, HIDDEN)), "grid": list(range(99))}, "at most 64 integers"),
        ({"embeds": [[0.5] * HIDDEN] * 4}, "at most 64 integers"),
        ({"dtype": "object", "shape": [1], "data": ""}, "an array must be"),
        ({"dtype": "float32", "shape": [-1], "data": ""}, "an array must be"),
        ({"dtype": "float32", "shape": [2**30, 2**30], "data": "AAAA"}, "has 3 bytes"),
        ({"dtype": "float32", "shape": [1], "data": "?"}, "base64 of an array is broken"),
        ({"dtype": "float32", "shape": [1], "data": "é"}, "base64 of an array is broken"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_embeddings_that_are_refused(llava, source, reason):
    with pytest.raises(RequestError, match=f"image 1: .*{reason}"):
        llava.render_conversation(chat({"type": "image_embeds", "image_embeds": source}))


def test_embeddings_are_bounded(make_seeing):
    made = make_seeing(max_media_bytes=1000)
    for source in (
        np.zeros((100, HIDDEN), np.float32),
        encode_array(np.zeros((100, HIDDEN), np.float32)),
    ):
        with pytest.raises(RequestError, match="more than the 1000 bytes"):
            made.render_conversation(chat({"type": "image_embeds", "image_embeds": source}))


# Checkpoints


def test_checkpoints_without_a_processor(make_renderer, tokenizer, make_seeing):
    renderer = make_renderer(tokenizer, hf_config={"vocab_size": 400})
    with pytest.raises(CheckpointError, match=r"neither preprocessor_config\.json"):
        renderer.set_rules(LlavaRules(renderer.config))
    # Who wants no images needs none.
    renderer = make_renderer(
        tokenizer, hf_config={"vocab_size": 400}, limit_mm_per_prompt=["image=0"]
    )
    renderer.set_rules(LlavaRules(renderer.config))
    assert renderer.render_prompt("a").features is None
    for images, reason in (
        ({"image_processor_type": "NoSuch"}, "cannot make the image processor"),
        ({"size": 3}, "cannot make"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            make_seeing(images=images).render_conversation(chat(of(pixels())))


@pytest.mark.parametrize(
    "changed",
    [
        {"size": {"shortest_edge": 10**6}},
        {"size": {"height": 10**5, "width": 10**5}},
        {"crop_size": {"height": 28, "width": 10**9}},
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 28, "width": 28},
            "pan_and_scan_max_num_crops": 100,
        },
        QWEN_IMAGES | {"size": {"shortest_edge": 3136, "longest_edge": 10**9}},
        QWEN_IMAGES | {"temporal_patch_size": 10**6},
    ],
    ids=repr,
)
def test_checkpoints_that_would_make_images_of_any_size(make_seeing, changed):
    made = make_seeing(images=CLIP | changed)
    with pytest.raises(CheckpointError, match="it may be"):
        made.render_conversation(chat(of(pixels())))


def test_fetches_go_on_side_by_side(llava, monkeypatch):
    """And the first item that is refused is the one that is named."""
    running = 0
    most = 0
    lock = threading.Lock()
    full = threading.Event()
    refused = threading.Event()

    def load(source, limits, *, label, param):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 4:
                full.set()
        if "late" in source:
            refused.set()
        else:
            (refused if "bad" in source else full).wait(30)
        with lock:
            running -= 1
        if "bad" in source:
            raise RequestError(f"{label}: it is refused.", param)
        return file_of(pixels(int(source[-1])))

    monkeypatch.setattr("toolkit_lm_renderer_hf.media.load_bytes", load)
    urls = [of(f"http://a/{number}") for number in range(8)]
    rendered = llava.render_conversation(chat(*urls))
    assert most == 4
    for seed, feature in enumerate(rendered.features):
        np.testing.assert_array_equal(
            values(feature), values(llava.render_conversation(chat(of(pixels(seed)))).features[0])
        )
    with pytest.raises(RequestError, match="image 2: it is refused"):
        llava.render_conversation(chat(urls[0], of("http://a/bad"), of("http://late/bad")))


def test_rules_of_another_tokenizer(make_seeing):
    class Other(LlavaRules):
        def placeholder_id(self, modality):
            return 399

    with pytest.raises(CheckpointError, match="no token 399, which stands for image"):
        make_seeing(Other)


def test_threads_share_it(make_seeing):
    made = make_seeing()
    messages = [chat("<image>", of(pixels(seed))) for seed in range(4)]
    alone = [made.render_conversation(one) for one in messages]
    fresh = make_seeing()
    found = {}

    def work(seed):
        found[seed] = [fresh.render_conversation(messages[seed]) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one == alone[seed] for seed in range(4) for one in found[seed])
