"""LLaVA-NeXT and LLaVA-OneVision against transformers, on random checkpoints in float32."""

from __future__ import annotations

import json

import numpy as np
import pytest
from picture_subjects import PictureSubject, write_marks
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import MultimodalConformance, checkpoint_config, randomize
from toolkit_lm_vision.anyres_rules import NEXT, AnyresShape
from transformers import (
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from vision_families import CLIP, IMAGE, SIGLIP_WITH_HEAD, TEXT

VIDEO = 9
SIZES = [[14, 28], [28, 14], [28, 28], [14, 42]]
PROCESSOR = {"image_grid_pinpoints": SIZES, "size": {"height": 14, "width": 14}}


def next_model():
    vision = CLIP.to_dict() | {"image_size": 14}
    config = LlavaNextConfig(
        vision_config=vision,
        text_config=LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        image_grid_pinpoints=SIZES,
    )
    return LlavaNextForConditionalGeneration(config)


def onevision():
    config = LlavaOnevisionConfig(
        vision_config=SIGLIP_WITH_HEAD.to_dict() | {"image_size": 14, "vision_use_head": False},
        text_config=Qwen2Config(**TEXT),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=SIZES,
        vision_aspect_ratio="anyres_max_2",
    )
    return LlavaOnevisionForConditionalGeneration(config)


def make_anyres(folder, kind):
    is_next = kind == "next"
    model = next_model() if is_next else onevision()
    randomize(model)
    model.eval()
    model.save_pretrained(folder)
    write_marks(folder, {"<image>": IMAGE})
    images = "LlavaNextImageProcessor" if is_next else "LlavaOnevisionImageProcessor"
    crop = {"crop_size": {"height": 14, "width": 14}} if is_next else {}
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": images, **PROCESSOR, **crop})
    )
    processor = (LlavaNextProcessor if is_next else LlavaOnevisionProcessor).__new__(
        LlavaNextProcessor if is_next else LlavaOnevisionProcessor
    )
    processor.image_token = "<image>"
    processor.patch_size = 7
    processor.num_image_tokens = 4
    processor.num_additional_image_tokens = 1
    processor.vision_aspect_ratio = "anyres_max_2"
    processor.vision_feature_select_strategy = "default" if is_next else "full"
    subject = PictureSubject(
        folder,
        model,
        "<image>",
        lambda arrays, i: processor.replace_image_token(arrays, i),
        lambda random: tuple(random.integers(5, 40, 2)),
        left_out=("batch_num_images",),
        family=kind,
    )
    processor.image_processor = subject.made
    return subject


@pytest.fixture(scope="module", params=["next", "onevision"])
def reference(request, tmp_path_factory):
    return make_anyres(tmp_path_factory.mktemp("anyres"), request.param)


class TestAnyres(MultimodalConformance):
    modality = "image"

    def test_what_does_not_fit_is_refused(self, reference):
        rules = rules_of(reference)
        given = reference.inputs("<image>", reference.items(1))
        good = {name: given[name].numpy() for name in ("pixel_values", "image_sizes")}
        assert rules.replacement("image", good).mask is None
        for wrong, reason in (
            ({"pixel_values": good["pixel_values"]}, "must have image_sizes"),
            ({**good, "image_sizes": np.array([[0, 4]])}, "height and width"),
            ({**good, "image_sizes": np.array([[4, 2**20]])}, "at most"),
            ({**good, "pixel_values": good["pixel_values"][0]}, "floats of shape"),
            (
                {"embeds": np.zeros((3, 64), np.float32), "image_sizes": good["image_sizes"]},
                "shape",
            ),
        ):
            with pytest.raises(RequestError, match=reason):
                rules.replacement("image", wrong)


def rules_of(reference):
    name = type(reference.model).__name__
    return Plugins.load().models.load_multimodal(name)(checkpoint_config(reference.folder))


def test_configs_of_no_sense_are_refused():
    config = next_model().config.to_dict()
    for wrong, reason in (
        ({"image_grid_pinpoints": [[14, 15]]}, "multiples of 14"),
        ({"image_grid_pinpoints": []}, "tiles need"),
        ({"vision_feature_select_strategy": "full"}, "tiles need"),
        ({"vision_aspect_ratio": "square"}, "must be like 'anyres_max_9'"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            AnyresShape.read({**config, **wrong}, NEXT)
