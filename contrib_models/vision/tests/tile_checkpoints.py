"""Checkpoint folders of small Idefics3, SmolVLM, Pixtral and Mistral 3 models, and what
transformers makes of their prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from toolkit_lm_devkit import randomize
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2Config,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from vision_checkpoints import Subject, write_template, write_vision_tokenizer
from vision_families import IMAGE, TEXT, TOWER

PLACES = {
    f"<row_{row + 1}_col_{column + 1}>": 20 + 3 * row + column
    for row in range(2)
    for column in range(3)
}
TILE_MARKS = {
    "<image>": IMAGE,
    "<fake_token_around_image>": 8,
    "<global-img>": 9,
    "<end_of_utterance>": 13,
    **PLACES,
}
ROW_MARKS = {"[IMG]": IMAGE, "[IMG_BREAK]": 8, "[IMG_END]": 9}
TILE = {**TOWER, "image_size": 28, "patch_size": 7}


def idefics3() -> Any:
    return Idefics3ForConditionalGeneration(
        Idefics3Config(
            vision_config=Idefics3VisionConfig(**TILE),
            text_config=LlamaConfig(**TEXT, architectures=["VLlama3ForCausalLM"]),
            image_token_id=IMAGE,
            scale_factor=2,
        )
    )


def smolvlm() -> Any:
    """One token a tile, and a text model of another kind."""
    return SmolVLMForConditionalGeneration(
        SmolVLMConfig(
            vision_config=SmolVLMVisionConfig(**TILE),
            text_config=Qwen2Config(**TEXT),
            image_token_id=IMAGE,
            scale_factor=4,
            tie_word_embeddings=True,
        )
    )


def pixtral(**fields: Any) -> Any:
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=PixtralVisionConfig(
                **TOWER, image_size=56, patch_size=7, hidden_act="silu"
            ),
            text_config=MistralConfig(**TEXT, sliding_window=None),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            **fields,
        )
    )


def mistral3(**tower: Any) -> Any:
    return Mistral3ForConditionalGeneration(
        Mistral3Config(
            vision_config=PixtralVisionConfig(
                **{**TOWER, "num_attention_heads": 2, **tower}, image_size=56, patch_size=7
            ),
            text_config=MistralConfig(**TEXT, sliding_window=None),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
            spatial_merge_size=2,
            tie_word_embeddings=False,
        )
    )


FAMILIES = {"idefics3": idefics3, "smolvlm": smolvlm, "pixtral": pixtral, "mistral3": mistral3}


def random_tiled(family: str, **fields: Any) -> Any:
    model = FAMILIES[family](**fields)
    randomize(model)
    return model.eval()


class RowProcessor:
    """What transformers' PixtralProcessor does, which needs torchvision for nothing."""

    def __init__(self, images: Any, tokenizer: Any, merge: int) -> None:
        self.images = images
        self.tokenizer = tokenizer
        self.side = 7 * merge

    def __call__(
        self, *, text: str, images: list[np.ndarray] | None, **options: Any
    ) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        if images:
            made = dict(self.images(images, patch_size=self.side, **options))
            pictures = iter(made["image_sizes"].tolist())
            text = re.sub(r"\[IMG\]", lambda _: self.rows(*next(pictures)), text)
        found = self.tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        return {**found, **made}

    def rows(self, height: int, width: int) -> str:
        row = "[IMG]" * (width // self.side)
        return "[IMG_BREAK]".join([row] * (height // self.side)) + "[IMG_END]"


class TiledSubject(Subject):
    """A checkpoint, and what transformers makes of it."""

    mark: Any = None

    def items(self, count: int, *, seed: int = 0) -> list[np.ndarray]:
        random = np.random.default_rng(seed)
        return [random.integers(0, 256, (*self.shape(random), 3), np.uint8) for _ in range(count)]

    def shape(self, random: np.random.Generator) -> list[int]:
        if self.mark == "[IMG]":
            return random.integers(9, 60, 2).tolist()
        # One row of two tiles, or one column.
        sides = [int(random.integers(30, 60)), int(random.integers(62, 90))]
        return sides if random.integers(2) else sides[::-1]


def make_tiled_subject(folder: Path, family: str, size: int = 56, **fields: Any) -> TiledSubject:
    model = random_tiled(family, **fields)
    model.save_pretrained(folder)
    if family in ("pixtral", "mistral3"):
        tokenizer = write_vision_tokenizer(folder, ROW_MARKS)
        merge = 2 if family == "mistral3" else 1
        images: Any = PixtralImageProcessorPil(
            size={"longest_edge": 35 if merge == 1 else 56}, patch_size={"height": 7, "width": 7}
        )
        processor: Any = RowProcessor(images, tokenizer, merge)
        stated = {
            "patch_size": 7,
            "spatial_merge_size": merge,
            "processor_class": "PixtralProcessor",
        }
        (folder / "processor_config.json").write_text(json.dumps(stated))
        mark = "[IMG]"
    else:
        tokenizer = write_vision_tokenizer(folder, TILE_MARKS)
        kind = Idefics3ImageProcessorPil if family == "idefics3" else SmolVLMImageProcessorPil
        images = kind(size={"longest_edge": size}, max_image_size={"longest_edge": 28})
        processor = Idefics3Processor(
            images, tokenizer, image_seq_len=(4 // model.config.scale_factor) ** 2
        )
        mark = "<image>"
    images.save_pretrained(folder)
    subject = TiledSubject(folder, model, processor, family)
    subject.mark = mark
    processor.chat_template = write_template(folder, mark)
    return subject
