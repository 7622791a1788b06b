"""Videos of LLaVA-OneVision: tokens of the prompt are those of transformers' processor, and those
drawn its model's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from picture_subjects import write_marks
from test_anyres import PROCESSOR, VIDEO, onevision
from test_qwen2_vl_rendered import GREEDY, OPTIONS
from test_qwen2_vl_watched import clip, frames_of_gif, gif
from test_timed_videos import drawn_by, read, said
from toolkit_lm import LLM
from toolkit_lm.errors import RequestError
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import checkpoint_config, load_checkpoint, randomize, run_ranks
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from vision_families import IMAGE
from vision_harness import sequences

NAME = "LlavaOnevisionForConditionalGeneration"
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    theirs = onevision()
    randomize(theirs)
    folder = tmp_path_factory.mktemp("onevision")
    theirs.eval().save_pretrained(folder)
    write_marks(folder, {"<image>": IMAGE, "<video>": VIDEO})
    images = {"image_processor_type": "LlavaOnevisionImageProcessor", **PROCESSOR}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    videos = {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": PROCESSOR["size"]}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return theirs, folder


def pixels_of(frames):
    """Arrays [1, n, channels, S, S] of frames that are as large as the tower's pictures."""
    values = (frames.astype(np.float32) / 255 - MEAN) / STD
    return torch.from_numpy(values).permute(0, 3, 1, 2)[None]


def of_transformers(subject, text, frames):
    theirs, folder = subject
    processor = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    processor.video_token = "<video>"
    processor.num_image_tokens = 4
    videos = {"pixel_values_videos": pixels_of(frames)}
    text = text.replace("<video>", processor.replace_video_token(videos, 0))
    ids = read(folder)(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    return drawn_by(theirs, ids, **videos, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 9}], ids=["whole", "chunked"])
def test_frames(subject, options):
    """Decoded frames; a file of four frames a second, of which two are taken; embeddings."""
    theirs, folder = subject
    one = clip(5, height=14, width=14)
    file = gif(clip(8, seed=3, height=14, width=14))
    text = "See: <video>."
    expected = [
        of_transformers(subject, text, one),
        of_transformers(subject, text, frames_of_gif(file)[[0, 2, 4, 6]]),
    ]
    with torch.inference_mode():
        [embeds] = theirs.get_video_features(
            pixels_of(one),
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            return_dict=True,
        ).pooler_output
    given = {"video_embeds": embeds.numpy()}
    prompts = [
        {"prompt": text, "multi_modal_data": {"video": video}} for video in (one, file, given)
    ]
    with LLM(str(folder), **{**OPTIONS, "max_model_len": 256}, **options) as llm:
        for _ in range(2):
            found = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [said(output) for output in found] == [*expected, expected[0]]


def test_embeddings_on_two_ranks(subject):
    theirs, folder = subject
    plugins = Plugins.load()
    clips = [pixels_of(clip(count, height=14, width=14)) for count in (1, 4)]
    expected = []
    for frames in clips:
        with torch.inference_mode():
            found = theirs.get_video_features(
                frames,
                vision_feature_layer=-1,
                vision_feature_select_strategy="full",
                return_dict=True,
            )
        expected.append(found.pooler_output[0])

    @torch.inference_mode()
    def encoded(rank):
        model = load_checkpoint(
            plugins.models.load(NAME), folder, rank=rank, plugins=plugins, tensor_parallel_size=2
        )
        return model.encode_items(
            "video",
            [{"pixel_values_videos": frames[0]} for frames in clips],
            lambda lengths: sequences(model, lengths),
        )

    for some in run_ranks(encoded, 2):
        for one, other in zip(some, expected, strict=True):
            assert one.shape == other.shape
            assert (one - other).abs().max() <= 1e-4 * max(1.0, float(other.abs().max()))


def test_what_is_no_video_is_refused(subject):
    rules = Plugins.load().models.load_multimodal(NAME)(checkpoint_config(subject[1]))
    pixels = np.zeros((3, 3, 14, 14), np.float32)
    assert rules.replacement("video", {"pixel_values_videos": pixels}).token_ids == [VIDEO] * 4
    for wrong, reason in (
        ({}, "must have pixel_values_videos, or embeds"),
        ({"pixel_values_videos": pixels, "more": pixels}, "must have pixel_values_videos"),
        ({"pixel_values_videos": pixels[:0]}, "floats of shape"),
        ({"pixel_values_videos": pixels[..., 1:]}, "floats of shape"),
        ({"pixel_values_videos": pixels.astype(int)}, "floats of shape"),
        ({"pixel_values_videos": pixels + np.inf}, "finite"),
        ({"embeds": np.zeros((1, 64), np.float32)}, "floats of shape"),
        ({"embeds": np.zeros((), np.float32)}, "floats of shape"),
    ):
        with pytest.raises(RequestError, match=reason):
            rules.replacement("video", wrong)
