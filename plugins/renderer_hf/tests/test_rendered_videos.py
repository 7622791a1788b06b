"""Videos in conversations and prompts: frames and files become the arrays that transformers' video
processor makes."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from movies import animation, decoded, movie
from PIL import Image
from seeing import GEMMA, QWEN, LlavaRules, QwenRules, token, train_newlines
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.renderer.feature_lookup import HeldFeature
from toolkit_lm_renderer_hf.sampling import Sampling

IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
VIDEOS = {
    "video_processor_type": "Qwen2VLVideoProcessor",
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16},
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
PLAIN = Sampling(
    temporal_patch_size=2, min_frames=4, max_frames=768, fps=None, num_frames=None, of_frames=False
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_newlines()


@pytest.fixture
def make_watching(tokenizer, make_renderer):
    def make(videos=VIDEOS, images=IMAGES, timed=True, rules=QwenRules, files=(), **options):
        found = {
            "chat_template.jinja": QWEN,
            "preprocessor_config.json": json.dumps(images),
            **dict(files),
        }
        if videos is not None:
            found["video_preprocessor_config.json"] = json.dumps(videos)
        config = {"vocab_size": 400, "vision_config": {"tokens_per_second": 2} if timed else {}}
        renderer = make_renderer(tokenizer, files=found, hf_config=config, **options)
        renderer.set_rules(rules(renderer.config))
        return renderer

    return make


@pytest.fixture
def watching(make_watching):
    return make_watching()


def frames_of(count=6, height=56, width=84, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), np.uint8)


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
    return {"type": "video", "video": source, **more}


def url(data):
    return {
        "type": "video_url",
        "video_url": {"url": f"data:video/any;base64,{base64.b64encode(data).decode()}"},
    }


def feature_of(renderer, *parts, **options):
    [feature] = renderer.render_conversation(chat(*parts), **options).features
    return feature


def arrays(feature):
    return {name: array.to_numpy() for name, array in feature.data.items()}


def pixels(feature):
    return arrays(feature)["pixel_values_videos"]


@pytest.fixture(scope="module")
def of_transformers(tmp_path_factory):
    """Results of transformers for CASES, and then for SAMPLES."""
    return computed(tmp_path_factory, [*CASES.values(), *SAMPLES])


def computed(tmp_path_factory, cases):
    """Results of transformers for cases."""
    path = tmp_path_factory.mktemp("reference") / "cases"
    path.write_bytes(pickle.dumps(cases))
    program = Path(__file__).with_name("reference_videos.py")
    subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(path)],
        check=True,
        timeout=120,
        stderr=subprocess.PIPE,
    )
    return pickle.loads(path.read_bytes())  # noqa: S301 # our own


# Like transformers


ROUND = {key: value for key, value in VIDEOS.items() if key != "video_processor_type"}
CASES = {
    "whole": (frames_of(), ROUND, 10.0, {}),
    "odd": (frames_of(5), ROUND, None, {}),
    "one": (frames_of(1), ROUND, 3.0, {}),
    "by rate": (frames_of(33), ROUND, 10.0, {"fps": 2.0, "do_sample_frames": True}),
    "by number": (frames_of(33), ROUND, 7.5, {"num_frames": 7, "do_sample_frames": True}),
    "normalized otherwise": (
        frames_of(4),
        {**ROUND, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.9, 0.8, 0.7]},
        24.0,
        {},
    ),
    "not rescaled": (frames_of(4), {**ROUND, "do_rescale": False}, 24.0, {}),
    "three frames a patch": (frames_of(7), {**ROUND, "temporal_patch_size": 3}, 24.0, {}),
    "no merging": (frames_of(3, 42, 70), {**ROUND, "merge_size": 1}, 24.0, {}),
}
ASKED = [{"num_frames": count} for count in (2, 3, 5, 8, 31, 64)] + [
    {"fps": fps} for fps in (0.1, 1.0, 2.0, 3.3, 24.0)
]
SAMPLES = [
    (total, {}, fps, options)
    for total in (2, 3, 4, 5, 7, 30, 67, 100, 241, 1801, 100_000)
    for fps in (1.0, 7.3, 29.97)
    for options in ASKED
    if round(options.get("num_frames", 0) / 2) * 2 <= total
]


def test_frames_are_what_transformers_makes_of_them(make_watching, of_transformers):
    """To the bit. Where frames are resized, Pillow's rounding and torchvision's are two."""
    for (name, (frames, config, fps, options)), (values, grid, seconds) in zip(
        CASES.items(), of_transformers[: len(CASES)], strict=True
    ):
        made = make_watching({**VIDEOS, **config, "do_resize": False})
        found = arrays(feature_of(made, of((frames, {"fps": fps})), mm_processor_kwargs=options))
        np.testing.assert_array_equal(found["pixel_values_videos"], values, err_msg=name)
        assert found["pixel_values_videos"].dtype == values.dtype == np.float32
        np.testing.assert_array_equal(found["video_grid_thw"], grid, err_msg=name)
        assert found["second_per_grid_ts"].tolist() == [seconds], name


def test_samples_are_those_of_transformers(of_transformers):
    for case, expected in zip(SAMPLES, of_transformers[len(CASES) :], strict=True):
        total, _, fps, options = case
        assert PLAIN.indices(total, fps, options, is_file=False) == expected, case


def test_frames_that_are_resized(watching):
    """Frames are resized like by the image processor: at one size, from the video's own bounds."""
    frames = frames_of(4, 200, 300)
    found = arrays(feature_of(watching, of(frames)))
    assert found["video_grid_thw"].tolist() == [[2, 6, 8]]
    small = np.stack(
        [
            np.asarray(Image.fromarray(one).resize((112, 84), Image.Resampling.BICUBIC))
            for one in frames
        ]
    )
    np.testing.assert_array_equal(
        found["pixel_values_videos"], pixels(feature_of(watching, of(small)))
    )


def test_a_frame_twice_is_an_image(make_watching):
    """One frame twice is like an image, which the image processor repeats."""
    watching = make_watching(
        {**VIDEOS, "size": {"shortest_edge": 784, "longest_edge": 784 * 16}},
        {**IMAGES, "size": VIDEOS["size"]},
    )
    frame = frames_of(1)[0]
    image, video = watching.render_conversation(
        chat({"type": "image", "image": frame}, of(np.stack([frame, frame])))
    ).features
    np.testing.assert_allclose(image.data["pixel_values"].to_numpy(), pixels(video), atol=1e-6)


# Sources


def test_a_video_is_the_same_however_its_frames_come(watching):
    frames = frames_of(5)
    pictures = [Image.fromarray(one) for one in frames]
    torch = pytest.importorskip("torch")
    sources = [
        frames,
        list(frames),
        pictures,
        tuple(pictures),
        np.moveaxis(frames, 3, 1),
        torch.from_numpy(frames),
        (frames, {}),
    ]
    found = [feature_of(watching, of(source)) for source in sources]
    assert len({one.mm_identifier for one in found}) == 1
    for one in found:
        np.testing.assert_array_equal(pixels(one), pixels(found[0]))
    text = "<|vision_start|><|video_pad|><|vision_end|>"
    prompts = [
        {"prompt": text, "multi_modal_data": {"video": source}}
        for source in [*sources, [frames], [pictures], [(frames, {})]]
    ]
    for prompt in prompts:
        [one] = watching.render_prompt(prompt).features
        assert one.mm_identifier == found[0].mm_identifier
    two = watching.render_prompt(
        {"prompt": text * 2, "multi_modal_data": {"video": [pictures, (frames, {"fps": 3})]}}
    ).features
    assert len({one.mm_identifier for one in two}) == 2


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "mp4", "webm"])
def test_a_file(watching, kind):
    """Four frames a second, of which two are taken."""
    data = (
        animation(kind) if kind.isupper() else movie(kind, "mpeg4" if kind == "mp4" else "libvpx")
    )
    found = feature_of(watching, url(data))
    for again in (
        of(data),
        of(bytearray(data)),
        {"type": "video", "url": url(data)["video_url"]["url"]},
    ):
        assert feature_of(watching, again) == found
    every = [
        np.asarray(one) for one in (decoded(data) if kind.islower() else decoded_animation(data))
    ]
    assert len(every) == 12
    taken = np.stack(every[::2])
    expected = arrays(feature_of(watching, of((taken, {"fps": 2}))))
    for name, values in arrays(found).items():
        np.testing.assert_array_equal(values, expected[name])
    assert arrays(found)["second_per_grid_ts"].tolist() == [1.0]
    assert arrays(found)["video_grid_thw"].tolist()[0][0] == 3
    whole = feature_of(watching, of(data), mm_processor_kwargs={"do_sample_frames": False})
    np.testing.assert_array_equal(pixels(whole), pixels(feature_of(watching, of(np.stack(every)))))
    assert whole.mm_identifier != found.mm_identifier


def decoded_animation(data):
    import io

    with Image.open(io.BytesIO(data)) as image:
        for number in range(image.n_frames):
            image.seek(number)
            yield image.convert("RGB")


def test_a_picture_that_is_no_animation(watching):
    [still] = [feature_of(watching, of(animation(frames=[one]))) for one in frames_of(1)]
    assert arrays(still)["video_grid_thw"].tolist()[0][0] == 1


def test_tokens_stand_where_the_video_does(watching):
    frames = frames_of()
    rendered = watching.render_conversation(
        chat("a", of(frames), "b", {"type": "image", "image": frames[0]}, of(frames[:2]))
    )
    first, image, last = rendered.features
    assert [one.modality for one in rendered.features] == ["video", "image", "video"]
    assert (first.mm_position.length, last.mm_position.length) == (18, 6)
    assert first.layout["grid_thw"] == [3, 4, 6]
    pad = token("<|video_pad|>")
    assert rendered.token_ids.count(pad) == 24
    for one in (first, last):
        at = one.mm_position
        assert rendered.token_ids[at.offset : at.end] == [pad] * at.length
    assert rendered.token_ids[image.mm_position.offset] == token("<|image_pad|>")


# Options


def test_options_make_frames_smaller_or_fewer(watching):
    frames = (frames_of(32, 112, 112), {"fps": 8})

    def grid(**options):
        return arrays(feature_of(watching, of(frames), mm_processor_kwargs=options))[
            "video_grid_thw"
        ].tolist()[0]

    assert grid() == [16, 8, 8]
    assert grid(max_pixels=28 * 28 * 4) == grid(size={"longest_edge": 28 * 28 * 4}) == [16, 4, 4]
    assert grid(fps=2) == grid(num_frames=8) == [4, 8, 8]
    assert grid(num_frames=1) == [1, 8, 8]


@pytest.mark.parametrize(
    "options",
    [
        {"fps": 0},
        {"fps": "2"},
        {"fps": float("nan")},
        {"fps": True},
        {"num_frames": 0},
        {"num_frames": 2.0},
        {"num_frames": 3, "fps": 1},
        {"do_sample_frames": 1},
        {"do_sample_frames": False, "fps": 1},
        {"max_pixels": 28 * 28 * 17},
        {"size": 4},
        {"min_frames": 2},
        {"do_resize": False},
    ],
    ids=repr,
)
def test_options_that_are_refused(watching, options):
    with pytest.raises(RequestError, match="mm_processor_kwargs") as caught:
        watching.render_conversation(chat(of(frames_of())), mm_processor_kwargs=options)
    assert caught.value.param == "mm_processor_kwargs"


def test_an_uploaded_file_may_be_a_video(watching):
    data = movie()
    part = {
        "type": "file",
        "file": {
            "filename": "a.png",
            "file_data": f"data:image/png;base64,{base64.b64encode(data).decode()}",
        },
    }
    assert feature_of(watching, part).mm_identifier == feature_of(watching, url(data)).mm_identifier


def test_identifiers_are_of_content_and_of_what_is_made_of_it(watching, make_watching):
    frames = frames_of(8)
    data = animation()

    def identifier(renderer=watching, source=frames, **options):
        uuid = options.pop("uuid", None)
        return feature_of(renderer, of(source, uuid=uuid), **options).mm_identifier

    found = [
        identifier(),
        identifier(source=frames[:7]),
        identifier(source=frames.reshape(8, 84, 56, 3)),
        identifier(source=frames.reshape(4, 112, 84, 3)),
        identifier(source=frames_of(8, seed=1)),
        identifier(source=(frames, {"fps": 2})),
        identifier(source=data),
        identifier(source=data, mm_processor_kwargs={"fps": 1}),
        identifier(mm_processor_kwargs={"num_frames": 4}),
        identifier(mm_processor_kwargs={"max_pixels": 784}),
        identifier(uuid="mine"),
        identifier(make_watching({**VIDEOS, "max_frames": 100})),
        watching.render_conversation(chat({"type": "image", "image": frames[0]}))
        .features[0]
        .mm_identifier,
    ]
    assert len(set(found)) == len(found)
    assert found[0] == identifier()


def test_a_video_that_the_engine_holds_is_not_decoded(watching, monkeypatch):
    data = movie()
    rendered = watching.render_conversation(chat(of(data)))
    [feature] = rendered.features
    at = feature.mm_position

    class Held:
        def get(self, identifier):
            assert identifier == feature.mm_identifier
            return HeldFeature(rendered.token_ids[at.offset : at.end], at.mask, feature.layout, 1)

    watching.feature_cache = Held()
    monkeypatch.setattr("toolkit_lm_renderer_hf.media.open_video", None)
    again = watching.render_conversation(chat(of(data)))
    assert again.token_ids == rendered.token_ids
    assert again.features[0].data is None and again.features[0].layout == feature.layout


# Refusals


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"no video", "not a video of a known format"),
        ("data:video/mp4;base64,AAAA", "not a video of a known format"),
        ("http://127.0.0.1/a.mp4", "not allowed"),
        ("/etc/passwd", "none of a data URL"),
        (movie()[:-100], "truncated movie"),
        (3, "its frames: an array"),
        ([], "its frames: an array"),
        ([b"a", b"b"], "its frames: an array"),
        (["http://a/1.png", "http://a/2.png"], "its frames: an array"),
        (np.zeros((0, 4, 4, 3), np.uint8), "no frames"),
        (np.zeros((4, 28, 28, 3), np.float32), "must be uint8"),
        (np.zeros((4, 28, 28, 7), np.uint8), "must be uint8"),
        (np.zeros((28, 28, 3), np.uint8), "its frames: an array"),
        ([np.zeros((28, 28, 3), np.uint8), np.zeros((28, 29, 3), np.uint8)], "two sizes"),
        (np.zeros((2, 1, 300, 3), np.uint8), "200 times as long"),
        ((frames_of(), {"fps": 0}), "fps must be a number"),
        ((frames_of(), {"speed": 1}), "only 'fps'"),
        ((frames_of(), {"fps": "2"}), "fps must be a number"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_videos_that_are_refused(watching, source, reason):
    start = time.process_time()
    for part, name in ((of(source), "messages"),):
        with pytest.raises(RequestError, match=f"video 2: .*{reason}") as caught:
            watching.render_conversation(chat(of(frames_of(2)), part))
        assert caught.value.param == name
    assert time.process_time() - start < 5


def test_bounds(make_watching):
    made = make_watching(max_media_frames=4)
    assert feature_of(made, of(frames_of(4)))
    for source, options in (
        (frames_of(5), {}),
        (animation(), {}),
        (animation(), {"num_frames": 6}),
    ):
        with pytest.raises(
            RequestError,
            match=r"video 1: . of its \d+ frames would be read, more than the 4 .*max_media_frames",
        ):
            made.render_conversation(chat(of(source)), mm_processor_kwargs=options)
    assert feature_of(made, of(animation()), mm_processor_kwargs={"fps": 1})
    made = make_watching(images={**IMAGES, "size": VIDEOS["size"]}, max_media_pixels=28 * 28 * 24)
    assert feature_of(made, of(frames_of(4)))
    with pytest.raises(
        RequestError,
        match=r"video 1: its 5 frames of 84 x 56 pixels are more than the 18816 "
        r"pixels.*max_media_pixels",
    ):
        made.render_conversation(chat(of(frames_of(5))))
    assert feature_of(made, of(frames_of(5)), mm_processor_kwargs={"max_pixels": 784})
    with pytest.raises(RequestError, match=r"video 1: it has 2000 x 1000 pixels.*max_media_pixels"):
        made.render_conversation(chat(of(np.zeros((2, 1000, 2000, 3), np.uint8))))
    made = make_watching(max_media_bytes=1000)
    with pytest.raises(RequestError, match=r"video 1: .*more than"):
        made.render_conversation(chat(of(movie())))


def test_numbers_that_need_a_rate(watching):
    with pytest.raises(RequestError, match="video 1: its frames come at an unknown rate"):
        watching.render_conversation(chat(of(frames_of())), mm_processor_kwargs={"fps": 1})
    with pytest.raises(RequestError, match="video 1: num_frames is 8, and it has 6 frames"):
        watching.render_conversation(chat(of(frames_of())), mm_processor_kwargs={"num_frames": 8})


def test_a_model_that_takes_no_videos(make_watching):
    made = make_watching(rules=LlavaRules, files={"chat_template.jinja": GEMMA})
    with pytest.raises(RequestError, match="video 1: this model takes no video, only image"):
        made.render_conversation(chat(of(frames_of())))


# Checkpoints


def test_where_a_checkpoint_says_how(make_watching):
    """In a part of processor_config.json, else in a file of its own, else where it says how images
    are processed."""
    nested = {
        "processor_config.json": json.dumps(
            {"video_processor": {**VIDEOS, "size": {"shortest_edge": 784, "longest_edge": 784 * 2}}}
        )
    }
    old = {**IMAGES, "min_pixels": 784, "max_pixels": 784 * 4}

    def tokens(*given, **files):
        return feature_of(
            make_watching(*given, **files), of(frames_of(2, 112, 112))
        ).mm_position.length

    assert tokens(None, old) == 4
    assert tokens() == 16
    assert tokens({**VIDEOS, "cap_pixels_per_frame": True, "max_video_tokens": 5}) == 4
    assert tokens(files=nested) == 1


def test_what_a_checkpoint_samples(make_watching):
    def frames(source, **stated):
        return (
            arrays(feature_of(make_watching({**VIDEOS, **stated}), of(source)))["video_grid_thw"][
                0, 0
            ]
            * 2
        )

    given = (frames_of(32), {"fps": 8})
    assert frames(given) == frames(given, fps=2) == 32
    assert frames(given, fps=2, do_sample_frames=True) == 8
    assert frames(given, num_frames=12, do_sample_frames=True) == 12
    assert frames(animation(), do_sample_frames=False) == 6
    assert frames(animation(), fps=4) == 12
    assert frames(animation(), num_frames=4) == 4
    assert frames(animation(), min_frames=8) == 8
    assert frames(animation(), max_frames=4) == 4


def test_a_model_that_is_not_told_the_time(make_watching):
    assert set(arrays(feature_of(make_watching(timed=False), of(frames_of())))) == {
        "pixel_values_videos",
        "video_grid_thw",
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"patch_size": 0},
        {"temporal_patch_size": 10**6},
        {"merge_size": "2"},
        {"size": {"shortest_edge": 784, "longest_edge": 10**12}},
        {"size": {"height": 3}},
        {"max_frames": -1},
        {"num_frames": 0.5},
        {"rescale_factor": 0},
        {"image_mean": ["a"]},
        {"fps": -1},
    ],
    ids=repr,
)
def test_checkpoints_of_no_sense(make_watching, changed):
    with pytest.raises(CheckpointError, match="the video processor's"):
        make_watching({**VIDEOS, **changed}).render_conversation(chat(of(frames_of())))


@pytest.mark.parametrize(
    "given",
    [
        {"videos": {**VIDEOS, "video_processor_type": "VideoLlama3VideoProcessor"}},
        {"images": {"image_processor_type": "CLIPImageProcessor"}},
    ],
    ids=repr,
)
def test_models_whose_videos_are_processed_otherwise(make_watching, given):
    with pytest.raises(
        RequestError,
        match=r"video 1: this renderer processes videos for Qwen-VL.*torchvision.*video_embeds",
    ):
        make_watching(**given).render_conversation(chat(of(frames_of())))
