"""Videos of Qwen3-VL, GLM, InternVL, LLaVA-OneVision, SmolVLM and Gemma 4: their arrays, samples
and sizes are those of transformers' video processors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_rendered_videos import computed, frames_of
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm_renderer_hf.glm_sampling import LengthSampling, SecondSampling
from toolkit_lm_renderer_hf.image_processor import ImageProcessor
from toolkit_lm_renderer_hf.sampling import (
    EdgeSampling,
    EvenSampling,
    MiddleSampling,
    UniformSampling,
)
from toolkit_lm_renderer_hf.video_kinds import (
    Glm41VideoProcessor,
    Glm46VideoProcessor,
    OneVisionVideoProcessor,
    PooledVideoProcessor,
    SquareVideoProcessor,
    TileVideoProcessor,
    TimedVideoProcessor,
    video_processor_of,
)

QWEN = {"video_processor_type": "Qwen3VLVideoProcessor"}
GLM41 = {"video_processor_type": "Glm4vVideoProcessor"}
GLM46 = {"video_processor_type": "Glm46VVideoProcessor"}
INTERN = {"video_processor_type": "InternVLVideoProcessor"}
ONEVISION = {"video_processor_type": "LlavaOnevisionVideoProcessor"}
SMOLVLM = {"video_processor_type": "SmolVLMVideoProcessor"}
GEMMA4 = {"video_processor_type": "Gemma4VideoProcessor"}
FRAMES = {
    "whole": (frames_of(6, 64, 96), {**QWEN, "do_sample_frames": False}, 10.0, {}),
    "odd": (frames_of(5, 32, 64), {**QWEN, "do_sample_frames": False}, None, {}),
    "by rate": (frames_of(33, 32, 32), QWEN, 10.0, {}),
    "by number": (frames_of(33, 32, 32), QWEN, 7.5, {"num_frames": 7, "fps": None}),
    "other patches": (
        frames_of(4, 56, 28),
        {**QWEN, "patch_size": 14, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.9, 0.8, 0.7]},
        24.0,
        {},
    ),
}
FRAMES |= {
    "GLM-4.1V, whole": (frames_of(6, 56, 84), {**GLM41, "do_sample_frames": False}, 10.0, {}),
    "GLM-4.1V, unknown rate": (
        frames_of(5, 56, 28),
        {**GLM41, "do_sample_frames": False},
        None,
        {},
    ),
    "GLM-4.1V": (frames_of(33, 28, 56), GLM41, 10.0, {}),
    "GLM-4.1V, by rate": (frames_of(33, 28, 56), GLM41, 10.0, {"fps": 3.0}),
    "GLM-4.6V": (frames_of(33, 28, 56), GLM46, 10.0, {}),
    "GLM-4.6V, of few frames": (frames_of(3, 28, 56), GLM46, 1.0, {}),
}
TILES = {
    "tiles": (frames_of(3, 28, 28), {**INTERN, "size": {"height": 28, "width": 28}}, 5.0, {}),
    "wholes": (frames_of(3, 28, 28), {**ONEVISION, "size": {"height": 28, "width": 28}}, 5.0, {}),
    "some tiles": (
        frames_of(9, 28, 28),
        {**INTERN, "size": {"height": 28, "width": 28}},
        5.0,
        {"num_frames": 4, "do_sample_frames": True},
    ),
}
SQUARES = {
    "squares": (frames_of(3, 28, 28), {**SMOLVLM, "max_image_size": {"longest_edge": 28}}, 5.0, {}),
    "some squares": (
        frames_of(40, 28, 28),
        {
            **SMOLVLM,
            "max_image_size": {"longest_edge": 28},
            "video_sampling": {"max_frames": 5, "fps": 1, "video_size": {"longest_edge": 28}},
            "image_mean": [0.1, 0.2, 0.3],
            "image_std": [0.9, 0.8, 0.7],
        },
        None,
        {},
    ),
}
POOLED = {
    "frames": (frames_of(3, 96, 48), {**GEMMA4, "do_sample_frames": False}, 5.0, {}),
    "some frames": (frames_of(9, 48, 48), {**GEMMA4, "num_frames": 4}, 5.0, {}),
}
TOTALS = (2, 3, 5, 30, 67, 241, 1801)
ASKED = [{"num_frames": count} for count in (1, 2, 5, 31)] + [{"fps": rate} for rate in (1.0, 3.3)]
SAMPLES = [
    (total, kind, rate, options)
    for kind in (QWEN, INTERN)
    for total in TOTALS
    for rate in (1.0, 29.97)
    for options in ASKED
    if options.get("num_frames", 0) <= total
    and (kind is QWEN or "num_frames" in options or 1 <= total / rate * options["fps"] <= total)
]
SAMPLES += [
    (total, kind, rate, options)
    for kind in (GLM41, GLM46)
    for total in (1, *TOTALS, 9001, 80_000)
    for rate in (1.0, 4.0, 23.976, 29.97, 60.0)
    for options in ([{}, {"fps": 0.7}, {"fps": 31.0}] if kind is GLM41 else [{}])
]
SAMPLES += [
    (total, kind, rate, options)
    for kind in (ONEVISION, GEMMA4)
    for total in TOTALS
    for rate in (1.0, 29.97)
    for options in ASKED
    if options.get("num_frames", 0) <= total
    and (
        "num_frames" in options
        or (kind is ONEVISION and 1 <= total / rate * options["fps"] <= total)
    )
]
SAMPLES += [
    (total, SMOLVLM, rate, options)
    for total in (1, *TOTALS, 9001)
    for rate in (0.5, 1.0, 4.0, 23.976, 29.97)
    for options in [{}, *ASKED]
]
CAPPED = {**QWEN, "cap_pixels_per_frame": True}
BOUNDS = {**QWEN, "size": {"shortest_edge": 4096, "longest_edge": 25_165_824}}
SIZES = [
    ((count, *size), kind, None, {})
    for kind in (QWEN, CAPPED, BOUNDS, GLM41, GLM46)
    for count in (2, 3, 7, 40, 300)
    for size in ((480, 640), (33, 20), (1080, 1920), (8, 900))
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Results of transformers, by the name of the list of cases."""
    lists = {
        "frames": [*(FRAMES | TILES | POOLED | SQUARES).values()],
        "samples": SAMPLES,
        "sizes": SIZES,
    }
    results = iter(computed(tmp_path_factory, [case for some in lists.values() for case in some]))
    return {name: [next(results) for _ in some] for name, some in lists.items()}


@pytest.fixture
def make(tmp_path):
    def made(config, /, **files):
        family = config["video_processor_type"].partition("VideoProcessor")[0]
        kind = {"InternVL": "GotOcr2", "Qwen3VL": "Qwen2VL"}.get(family, family) + "ImageProcessor"
        written = {
            "preprocessor_config": {"image_processor_type": kind},
            "video_preprocessor_config": config,
            "config": {},
            **files,
        }
        for name, value in written.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
        images = ImageProcessor(tmp_path, 2**26)
        return video_processor_of(tmp_path, images, 2**26, timed=False)

    return made


def processed(processor, frames, fps, options):
    sampling = processor.sampling
    indices = sampling.indices(len(frames), fps, processor.options(options), is_file=False)
    arrays = processor.process(iter(frames[indices]), len(indices), {}, lambda tokens: None)
    return arrays | processor.clock(indices, len(frames), fps)


def test_frames_are_what_transformers_makes_of_them(make, reference):
    """To the bit. Where frames are resized, Pillow's rounding and torchvision's are two."""
    for (name, (frames, config, fps, options)), expected in zip(
        (FRAMES | TILES | POOLED | SQUARES).items(), reference["frames"], strict=True
    ):
        found = processed(make({**config, "do_resize": False}), frames, fps, options)
        if name in SQUARES:
            np.testing.assert_array_equal(found["pixel_values"], expected, err_msg=name)
            continue
        pixels = found["pixel_values_videos"]
        if name in POOLED:
            np.testing.assert_array_equal(pixels, expected[0], err_msg=name)
            np.testing.assert_array_equal(found["video_position_ids"], expected[1], err_msg=name)
            continue
        if name in TILES:
            np.testing.assert_array_equal(pixels, expected, err_msg=name)
            continue
        np.testing.assert_array_equal(pixels, expected[0], err_msg=name)
        np.testing.assert_array_equal(found["video_grid_thw"], expected[1], err_msg=name)
        assert found["timestamps"].tolist() == expected[2], name


def test_samples_are_those_of_transformers(make, reference):
    samplings = {
        "Qwen3VLVideoProcessor": EvenSampling(2, 4, 768, 2, None, of_frames=True),
        "Glm4vVideoProcessor": SecondSampling(2, 4, 768, 2, None, of_frames=True),
        "Glm46VVideoProcessor": LengthSampling(2, 4, 768, 2, None, of_frames=True),
        "LlavaOnevisionVideoProcessor": UniformSampling(1, 1, 768, None, None, of_frames=True),
        "Gemma4VideoProcessor": UniformSampling(1, 1, 768, None, 32, of_frames=True),
        "SmolVLMVideoProcessor": EdgeSampling(1, 1, 768, None, None, of_frames=True),
        "InternVLVideoProcessor": MiddleSampling(1, 1, 768, None, None, of_frames=False),
    }
    for (total, kind, fps, options), expected in zip(SAMPLES, reference["samples"], strict=True):
        sampling = samplings[kind["video_processor_type"]]
        found = sampling.indices(total, fps, options, is_file=False)
        assert found == expected, (total, kind, fps, options)


def test_sizes_are_those_of_transformers(make, reference):
    for ((count, height, width), config, *_), expected in zip(
        SIZES, reference["sizes"], strict=True
    ):
        processor = make(config)
        size = processor._config["size"]
        rows, columns = processor._resized(height, width, count, size)
        patch = processor._config["patch_size"] ** 2
        assert -(-count // 2) * rows * columns // patch == expected, (config, count, height, width)


def test_frames_that_are_resized(make):
    """Frames become what the image processor makes of them, to 1/255."""
    frames = frames_of(2, 40, 56)
    processor = make({**INTERN, "size": {"height": 28, "width": 28}})
    found = processed(processor, frames, None, {})["pixel_values_videos"]
    images = processor._images.loaded(
        list(frames), size={"height": 28, "width": 28}, return_tensors="np", crop_to_patches=False
    )
    assert found.shape == (2, 3, 28, 28)
    np.testing.assert_allclose(found, images["pixel_values"], atol=1e-5)


def test_frames_that_become_squares(make):
    """A frame is resized to its longer side, and then to a square; so do pictures that are not
    cut into tiles."""
    stated = {**SMOLVLM, "size": {"longest_edge": 40}, "max_image_size": {"longest_edge": 28}}
    processor = make(stated)
    for shape in ((30, 56), (80, 20), (28, 28)):
        frames = frames_of(2, *shape)
        found = processed(processor, frames, 2.0, {})
        images = processor._images.loaded(
            list(frames),
            size={"longest_edge": 40},
            max_image_size={"longest_edge": 28},
            do_image_splitting=False,
            return_tensors="np",
        )
        expected = images["pixel_values"].reshape(1, 2, 3, 28, 28)
        np.testing.assert_allclose(found["pixel_values"], expected, atol=1e-5)
        assert found["timestamps"].tolist() == [0.0, 0.5]
        assert found["duration"].tolist() == [1.0]
    assert "duration" not in processed(processor, frames, None, {})
    unsized = make({**stated, "do_resize": False})
    with pytest.raises(RequestError, match="20 x 80 pixels; the checkpoint takes 28 x 28"):
        processed(unsized, frames_of(1, 80, 20), None, {})
    own = {"max_frames": 3, "fps": 2, "video_size": {"longest_edge": 40}}
    for sized, longest in (({}, 40), ({"size": {"longest_edge": 50}}, 50)):
        config = make({**SMOLVLM, **sized, "video_sampling": own})._config
        assert (config["num_frames"], config["fps"]) == (3, 2)
        assert config["size"] == {"longest_edge": longest}
    for wrong in ({"size": {"height": 4}}, {"max_image_size": {"longest_edge": 0}}):
        with pytest.raises(CheckpointError, match="the video processor's longest_edge of"):
            make({**SMOLVLM, **wrong}).sampling  # noqa: B018
    with pytest.raises(RequestError, match="unknown rate"):
        processed(processor, frames_of(3, 64, 64), None, {"fps": 1.0})


def test_which_processor_it_is(make):
    """By its name, or else by the model's."""
    assert isinstance(make(QWEN), TimedVideoProcessor)
    assert isinstance(make(INTERN), TileVideoProcessor)
    unnamed = make(QWEN, video_preprocessor_config={}, config={"model_type": "qwen3_5_moe"})
    assert isinstance(unnamed, TimedVideoProcessor)
    assert unnamed.sampling.max_frames == 768
    for config, types, kind in (
        (GEMMA4, ("gemma4",), PooledVideoProcessor),
        (ONEVISION, ("llava_onevision",), OneVisionVideoProcessor),
        (SMOLVLM, ("smolvlm",), SquareVideoProcessor),
        (GLM41, ("glm4v", "glm4v_moe"), Glm41VideoProcessor),
        (GLM46, ("glm46v", "glm_ocr"), Glm46VideoProcessor),
    ):
        assert type(make(config)) is kind
        for name in types:
            found = make(config, video_preprocessor_config={}, config={"model_type": name})
            assert type(found) is kind
            assert found.sampling.of_frames is (
                kind not in (OneVisionVideoProcessor, SquareVideoProcessor)
            )
    unnamed = make(INTERN, video_preprocessor_config={}, config={"model_type": "internvl"})
    assert isinstance(unnamed, TileVideoProcessor)


def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(RequestError, match="1 of its frames are taken; the model needs 2 or more"):
        processed(make(QWEN), frames_of(1, 64, 64), 1.0, {"do_sample_frames": False})
    with pytest.raises(RequestError, match="num_frames is 5, and it has 3 frames"):
        processed(make(QWEN), frames_of(3, 64, 64), 1.0, {"num_frames": 5})
    with pytest.raises(RequestError, match="num_frames is 5, and it has 3 frames"):
        processed(make(INTERN), frames_of(3, 64, 64), 1.0, {"num_frames": 5})
    with pytest.raises(RequestError, match="unknown rate"):
        processed(make(INTERN), frames_of(3, 64, 64), None, {"fps": 1.0})
    with pytest.raises(RequestError, match="size cannot be set"):
        processed(make(INTERN), frames_of(3, 64, 64), None, {"size": {"height": 14}})
    with pytest.raises(RequestError, match="num_frames cannot be set: this model"):
        processed(make(GLM41), frames_of(4, 56, 56), 1.0, {"num_frames": 2})
    with pytest.raises(RequestError, match="fps cannot be set: this model"):
        processed(make(GLM46), frames_of(4, 56, 56), 1.0, {"fps": 2.0})
    with pytest.raises(RequestError, match=r"unknown rate: .* or do_sample_frames: false"):
        processed(make(GLM46), frames_of(4, 56, 56), None, {})
    with pytest.raises(RequestError, match="takes 40000000 frames of 4 seconds"):
        processed(make({**GLM41, "fps": 1e7}), frames_of(4, 56, 56), 1.0, {})
    with pytest.raises(CheckpointError, match="max_duration is 0"):
        make({**GLM41, "max_duration": 0}).sampling  # noqa: B018
    for config in (GEMMA4, ONEVISION):
        with pytest.raises(RequestError, match="max_pixels cannot be set"):
            processed(make(config), frames_of(3, 64, 64), None, {"max_pixels": 14})
    with pytest.raises(CheckpointError, match="max_soft_tokens is 0"):
        make({**GEMMA4, "max_soft_tokens": 0}).sampling  # noqa: B018
    huge = {**INTERN, "size": {"height": 4096, "width": 4096}}
    with pytest.raises(RequestError, match="more than the 67108864 pixels"):
        processed(make(huge), frames_of(5, 64, 64), None, {})
    for wrong in ({"initial_shift": -1}, {"size": {"height": 0, "width": 1}}, {"num_frames": 0}):
        with pytest.raises(CheckpointError, match="the video processor's"):
            make({**INTERN, **wrong}).sampling  # noqa: B018
