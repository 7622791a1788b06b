"""Checkpoints whose processor expands a placeholder by the arrays of its picture, as the
conformance kit asks for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from toolkit_lm_devkit import write_tokenizer
from transformers import AutoImageProcessor, PreTrainedTokenizerFast
from vision_families import VOCAB


def write_marks(folder: Path, marks: Mapping[str, int]) -> None:
    """A tokenizer with special tokens."""
    write_tokenizer(folder, VOCAB)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    special = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**special, "id": number, "content": mark} for mark, number in marks.items()
    ]
    tokenizer["model"]["vocab"] |= marks
    path.write_text(json.dumps(tokenizer))


@dataclass
class PictureSubject:
    """A checkpoint, and what transformers makes of it."""

    folder: Path
    model: Any
    mark: str
    expand: Callable[[Any, int], str]
    """Text of a picture, by the arrays of all and its number."""
    draw: Callable[[np.random.Generator], tuple[int, ...]]
    """Height and width of a picture."""
    left_out: tuple[str, ...] = ()
    """Arrays that the model does not take."""
    extra: Callable[[torch.Tensor], dict[str, torch.Tensor]] = lambda ids: {}
    """Inputs that follow from tokens."""
    family: str = ""
    made: Any = field(init=False)

    def __post_init__(self) -> None:
        self.made = AutoImageProcessor.from_pretrained(self.folder, backend="pil")

    def items(self, count: int, *, seed: int = 0) -> list[np.ndarray]:
        random = np.random.default_rng(seed)
        return [random.integers(0, 256, (*self.draw(random), 3), np.uint8) for _ in range(count)]

    def inputs(self, text: str, images: list[np.ndarray]) -> dict[str, torch.Tensor]:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(self.folder / "tokenizer.json"), pad_token="<pad>"
        )
        arrays: dict[str, Any] = {}
        if images:
            arrays = dict(
                self.made(list(images), return_tensors="pt", input_data_format="channels_last")
            )
        parts = text.split(self.mark)
        whole = parts[0] + "".join(
            self.expand(arrays, number) + part for number, part in enumerate(parts[1:])
        )
        ids = tokenizer(whole, return_tensors="pt", add_special_tokens=False)["input_ids"]
        for name in self.left_out:
            arrays.pop(name, None)
        return {"input_ids": ids, **arrays, **self.extra(ids)}

    @torch.inference_mode()
    def greedy(
        self, text: str, images: list[np.ndarray], count: int
    ) -> tuple[list[int], list[int]]:
        inputs = self.inputs(text, images)
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None
        drawn = self.model.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=2,
        )
        length = inputs["input_ids"].shape[1]
        return drawn[0, :length].tolist(), drawn[0, length:].tolist()
