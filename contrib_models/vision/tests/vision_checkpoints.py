"""Checkpoint folders of small vision models with all that a renderer reads, and transformers'
processor of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from toolkit_lm_devkit import write_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from vision_families import BEGIN, END, IMAGE, VOCAB, random_model

MARKS = {"<image>": IMAGE, "<start_of_image>": BEGIN, "<end_of_image>": END}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]\n{% if m['content'] is string %}{{ "
    "m['content'] }}{% else %}"
    "{% for p in m['content'] %}{{ MARK if p['type'] == 'image' else p['text'] }}{% endfor %}{% "
    "endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
"""Chat template like Gemma's, with a line break where a picture may follow."""
NEWLINE = "Ċ"
"""A line break, as tokenizers of bytes write it."""


def write_vision_tokenizer(folder: Path, marks: dict[str, int] = MARKS) -> PreTrainedTokenizerFast:
    """With tokens for pictures, and for two and three line breaks in a row: Gemma's has such."""
    write_tokenizer(folder, VOCAB)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    special = next(iter(tokenizer["added_tokens"]))
    tokenizer["added_tokens"] += [
        {**special, "id": number, "content": mark} for mark, number in marks.items()
    ]
    tokenizer["model"]["vocab"] |= marks | {NEWLINE * 2: 10, NEWLINE * 3: 11}
    tokenizer["model"]["merges"] = [[NEWLINE, NEWLINE], [NEWLINE * 2, NEWLINE]]
    path.write_text(json.dumps(tokenizer))
    named = {
        "image_token": "<image>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    return PreTrainedTokenizerFast(
        tokenizer_file=str(path), extra_special_tokens=named, bos_token="<s>", pad_token="<pad>"
    )


@dataclass
class Subject:
    """A checkpoint, and what transformers makes of it."""

    folder: Path
    model: Any
    processor: Any
    family: str

    @cached_property
    def mark(self) -> str:
        """Text of a picture's placeholder."""
        return "<start_of_image>" if self.is_gemma else "<image>"

    @property
    def is_gemma(self) -> bool:
        return self.model.config.model_type == "gemma3"

    def items(self, count: int, *, seed: int = 0) -> list[np.ndarray]:
        return drawings(count, seed)

    def inputs(self, text: str, images: list[np.ndarray]) -> dict[str, torch.Tensor]:
        """Inputs of transformers' model."""
        given = self.processor(
            text=text, images=images or None, return_tensors="pt", input_data_format="channels_last"
        )
        return {
            name: value
            for name, value in given.items()
            if name not in ("num_crops", "mm_token_type_ids")
        }

    @torch.inference_mode()
    def greedy(
        self, text: str, images: list[np.ndarray], count: int
    ) -> tuple[list[int], list[int]]:
        """Tokens of a prompt, and those that transformers draws after it."""
        inputs = self.inputs(text, images)
        options = {
            "do_sample": False,
            "max_new_tokens": count,
            "min_new_tokens": count,
            "pad_token_id": 2,
            "eos_token_id": VOCAB + 1,
        }
        drawn = self.model.generate(**inputs, **{**options, "eos_token_id": None})
        length = inputs["input_ids"].shape[1]
        return drawn[0, :length].tolist(), drawn[0, length:].tolist()


def write_template(folder: Path, mark: str) -> str:
    """The chat template of a checkpoint, whose pictures have this mark."""
    path = folder / "tokenizer_config.json"
    template = TEMPLATE.replace("MARK", repr(mark))
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return template


def make_subject(folder: Path, family: str) -> Subject:
    model = random_model(family)
    model.save_pretrained(folder)
    tokenizer = write_vision_tokenizer(folder)
    vision = model.config.vision_config
    size = {"height": vision.image_size, "width": vision.image_size}
    if model.config.model_type == "gemma3":
        images: Any = Gemma3ImageProcessorPil(size=size)
        processor: Any = Gemma3Processor(
            images, tokenizer, image_seq_length=model.config.mm_tokens_per_image
        )
    else:
        is_clip = vision.model_type == "clip_vision_model"
        images = (
            CLIPImageProcessorPil(size={"shortest_edge": vision.image_size}, crop_size=size)
            if is_clip
            else SiglipImageProcessorPil(size=size)
        )
        processor = LlavaProcessor(
            images,
            tokenizer,
            patch_size=vision.patch_size,
            vision_feature_select_strategy=model.config.vision_feature_select_strategy,
            num_additional_image_tokens=int(is_clip),
        )
    images.save_pretrained(folder)
    subject = Subject(folder, model, processor, family)
    processor.chat_template = write_template(folder, subject.mark)
    return subject


def drawings(count: int, seed: int = 0) -> list[np.ndarray]:
    """Pictures of mixed sizes [height, width, 3]."""
    random = np.random.default_rng(seed)
    return [
        random.integers(0, 256, (*random.integers(12, 90, 2), 3), np.uint8) for _ in range(count)
    ]
