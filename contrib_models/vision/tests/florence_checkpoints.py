"""A small checkpoint of Florence-2 with all that a renderer reads, and what transformers makes of
it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from toolkit_lm_devkit import randomize
from transformers import BartConfig, Florence2Config, Florence2ForConditionalGeneration
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.florence2.processing_florence2 import Florence2Processor
from vision_checkpoints import write_vision_tokenizer
from vision_families import IMAGE, VOCAB

START = 1
BEGIN = 0
TOKENS = 26
"""Tokens of a picture of SIDE x SIDE pixels: windows of 3 x 3 do not fill its 5 x 5 states."""
SIDE = 40
VISION: dict[str, Any] = {
    "depths": [1, 2],
    "patch_size": [7, 3],
    "patch_stride": [4, 2],
    "patch_padding": [3, 1],
    "patch_prenorm": [False, True],
    "embed_dim": [16, 32],
    "num_heads": [4, 8],
    "num_groups": [8, 4],
    "window_size": 3,
    "projection_dim": 64,
    "max_position_embeddings": 8,
}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 512,
    "scale_embedding": True,
    "bos_token_id": BEGIN,
    "eos_token_id": START,
    "pad_token_id": 2,
    "decoder_start_token_id": START,
    "forced_eos_token_id": None,
}


def random_florence(
    vision: dict[str, Any] | None = None, *, attention: float = 2.0, **text: Any
) -> Florence2ForConditionalGeneration:
    """`vision` and `text`: fields in place of those above. `attention`: a factor of its weights."""
    model = Florence2ForConditionalGeneration(
        Florence2Config(
            vision_config={**VISION, **(vision or {})},
            text_config=BartConfig(**TEXT | text),
            image_token_id=IMAGE,
        )
    )
    randomize(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            # Biases of 1 would have all prompts end in one token; so would weak attention.
            if name.endswith(".bias"):
                param.sub_(1.0)
            if name.endswith(("q_proj.weight", "k_proj.weight", "encoder_attn.v_proj.weight")):
                param.mul_(attention)
    return model.eval()


@dataclass
class FlorenceSubject:
    """A checkpoint, and what transformers makes of it."""

    folder: Path
    model: Any
    processor: Any

    def inputs(self, text: str, picture: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Inputs of the encoder by transformers' processor."""
        images = {} if picture is None else {"images": [picture]}
        made = self.processor(text=[text], return_tensors="pt", **images)
        return {name: made[name] for name in ("input_ids", "pixel_values") if name in made}

    @torch.inference_mode()
    def greedy(
        self, text: str, picture: np.ndarray | None = None, count: int = 8
    ) -> tuple[list[int], list[int]]:
        """Tokens of the encoder, and those of the decoder: `count` after the first two."""
        inputs = self.inputs(text, picture)
        drawn = self.model.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            do_sample=False,
            max_new_tokens=count + 1,
            min_new_tokens=count + 1,
            eos_token_id=None,
        )
        return inputs["input_ids"][0].tolist(), drawn[0].tolist()

    @torch.inference_mode()
    def logits(self, inputs: dict[str, torch.Tensor], decoder_ids: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] at each token of the decoder, in float32."""
        made = {**inputs}
        if "pixel_values" in made:
            made["pixel_values"] = made["pixel_values"].to(self.model.dtype)
        return self.model(**made, decoder_input_ids=decoder_ids[None]).logits[0].float()


def make_florence(folder: Path, **fields: Any) -> FlorenceSubject:
    """`fields`: those of `random_florence`. There is no chat template, as in published ones."""
    model = random_florence(**fields)
    model.save_pretrained(folder)
    generation = folder / "generation_config.json"
    stated = json.loads(generation.read_text())
    stated["forced_bos_token_id"] = BEGIN
    generation.write_text(json.dumps(stated))
    model.generation_config.forced_bos_token_id = BEGIN
    tokenizer = write_vision_tokenizer(folder)
    tokenizer.eos_token = "</s>"
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))
    images = CLIPImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    images.image_seq_length = TOKENS
    images.save_pretrained(folder)
    return FlorenceSubject(folder, model, Florence2Processor(images, tokenizer))
