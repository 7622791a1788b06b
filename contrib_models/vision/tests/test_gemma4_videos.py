"""Videos of Gemma 4: tokens of the prompt are those of transformers' processor, and those drawn its
model's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from picture_subjects import write_marks
from test_gemma4_vision import MARKS, NAME, PROCESSOR, gemma4
from test_qwen2_vl_rendered import GREEDY, OPTIONS
from test_qwen2_vl_watched import clip, frames_of_gif, gif
from test_timed_videos import drawn_by, read, said
from toolkit_lm import LLM
from toolkit_lm.errors import RequestError
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import checkpoint_config
from transformers import AutoImageProcessor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.video_utils import VideoMetadata

VIDEO = 10
TEXT = "See: <|video|>."


@pytest.fixture(scope="module", params=["small", "large"])
def subject(request, tmp_path_factory):
    theirs = gemma4(request.param)
    theirs.config.video_token_id = VIDEO
    folder = tmp_path_factory.mktemp("gemma4")
    theirs.save_pretrained(folder)
    write_marks(folder, {**MARKS, "<|video|>": VIDEO})
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    names = ("patch_size", "pooling_kernel_size", "max_soft_tokens", "do_resize")
    videos = {name: PROCESSOR[name] for name in names}
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps({**videos, "video_processor_type": "Gemma4VideoProcessor", "num_frames": 4})
    )
    return theirs, folder


def arrays_of(subject, frames):
    images = AutoImageProcessor.from_pretrained(subject[1], backend="pil")
    made = images(list(frames), return_tensors="pt", input_data_format="channels_last")
    return {
        "pixel_values_videos": made["pixel_values"],
        "video_position_ids": made["image_position_ids"],
        "num_frames_per_video": torch.tensor([len(frames)]),
    }


def of_transformers(subject, frames, indices, fps):
    """Tokens of a text with a video, and those that transformers draws."""
    theirs, folder = subject
    processor = Gemma4Processor.__new__(Gemma4Processor)
    processor.boi_token = "<|image>"
    processor.eoi_token = "<image|>"
    processor.video_token = "<|video|>"
    arrays = arrays_of(subject, frames)
    num_patches = int((arrays["video_position_ids"][0, :, 0] >= 0).sum())
    metadata = VideoMetadata(total_num_frames=99, fps=fps, frames_indices=np.array(indices))
    made = {"num_soft_tokens_per_video": [num_patches // 4], "video_metadata": [metadata]}
    text = TEXT.replace("<|video|>", processor.replace_video_token(made, 0))
    ids = read(folder)(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    types = (ids == VIDEO).long() * 2
    return drawn_by(
        theirs, ids, **arrays, mm_token_type_ids=types, attention_mask=torch.ones_like(ids)
    )


def test_frames_after_their_times(subject):
    """Decoded frames, 20 seconds apart; a file of four frames a second; fewer frames than are
    taken; embeddings."""
    theirs, folder = subject
    one = clip(5, height=16, width=24)
    file = gif(clip(8, seed=3, height=16, width=24))
    short = clip(3, seed=4, height=8, width=24)
    expected = [
        of_transformers(subject, one[:4], [0, 1, 2, 3], 0.05),
        of_transformers(subject, frames_of_gif(file)[[0, 2, 4, 6]], [0, 2, 4, 6], 4.0),
        of_transformers(subject, short, [0, 1, 2], 24.0),
    ]
    with torch.inference_mode():
        [embeds] = theirs.model.get_video_features(
            **arrays_of(subject, short), return_dict=True
        ).pooler_output
    given = {"video_embeds": embeds.numpy(), "timestamps": np.array([0, 1 / 24, 2 / 24])}
    prompts = [
        {"prompt": TEXT, "multi_modal_data": {"video": video}}
        for video in ((one, {"fps": 0.05}), file, short, given)
    ]
    with LLM(str(folder), **{**OPTIONS, "max_model_len": 256}) as llm:
        for _ in range(2):
            found = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [said(output) for output in found] == [*expected, expected[-1]]


def test_what_is_no_video_is_refused(subject):
    rules = Plugins.load().models.load_multimodal(NAME)(checkpoint_config(subject[1]))
    arrays = arrays_of(subject, clip(2, height=8, width=8))
    good = {
        "pixel_values_videos": arrays["pixel_values_videos"].numpy(),
        "video_position_ids": arrays["video_position_ids"].numpy(),
        "timestamps": np.array([0.0, 61.0]),
    }
    assert rules.texts("video", good) == {"timestamp_ids": [" 01:01 "]}
    good["timestamp_ids"] = np.array([[40, 41]])
    found = rules.replacement("video", good)
    assert found.token_ids == [8, VIDEO, 9, 40, 41, 8, VIDEO, 9]
    assert found.mask == [False, True, False, False, False, False, True, False]
    places = good["video_position_ids"].copy()
    places[1] = -1
    for changed, reason in (
        ({"timestamps": np.array([0.0])}, "floats of shape"),
        ({"timestamps": np.array([-1.0, 0])}, "must have timestamps"),
        ({"timestamp_ids": np.array([[40], [41]])}, "as many timestamps"),
        ({"timestamp_ids": np.array([[VIDEO]])}, "tokens of text"),
        ({"video_position_ids": places}, "must be the same"),
        ({"more": places}, "must have pixel_values_videos and"),
    ):
        with pytest.raises(RequestError, match=reason):
            rules.replacement("video", {**good, **changed})
    with pytest.raises(RequestError, match="begin in the first second"):
        rules.texts("video", {"timestamps": np.array([1.0, 2.0])})
