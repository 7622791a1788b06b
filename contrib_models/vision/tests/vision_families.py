"""Small vision models of transformers, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from toolkit_lm_devkit import randomize
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    Qwen2Config,
    SiglipVisionConfig,
)

VOCAB = 300
IMAGE = 7
BEGIN = 8
END = 9
"""Tokens of pictures."""
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
CLIP = CLIPVisionConfig(**TOWER, image_size=28, patch_size=7)
SIGLIP = SiglipVisionConfig(
    **{**TOWER, "num_attention_heads": 2}, image_size=30, patch_size=7, vision_use_head=False
)
SIGLIP_WITH_HEAD = SiglipVisionConfig(**TOWER, image_size=28, patch_size=7)
GPT2 = {
    "tie_word_embeddings": False,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": VOCAB,
    "n_positions": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def llava(vision: Any = CLIP, text: Any = None, **fields: Any) -> Any:
    config = LlavaConfig(
        vision_config=vision,
        text_config=text or LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        **fields,
    )
    return LlavaForConditionalGeneration(config)


def gemma3(tokens: int = 4, **fields: Any) -> Any:
    given = {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    text = Gemma3TextConfig(**{**TEXT, **given, "query_pre_attn_scalar": 16, **fields})
    vision = SiglipVisionConfig(**TOWER, image_size=28, patch_size=7, vision_use_head=False)
    marks = {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(vision_config=vision, text_config=text, mm_tokens_per_image=tokens, **marks)
    )


FAMILIES = {
    "llava": llava,
    "llava, all of CLIP's states": lambda: llava(vision_feature_select_strategy="full"),
    "llava, several layers": lambda: llava(vision_feature_layer=[0, 2, -1]),
    "llava, without biases": lambda: llava(
        multimodal_projector_bias=False, projector_hidden_act="relu"
    ),
    "llava, SigLIP and Qwen2": lambda: llava(
        SIGLIP,
        Qwen2Config(**TEXT, tie_word_embeddings=True),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "llava, SigLIP less a patch": lambda: llava(SIGLIP_WITH_HEAD),
    "llava, Mistral": lambda: llava(text=MistralConfig(**TEXT, sliding_window=9)),
    "llava, GPT-2": lambda: llava(text=GPT2Config(**GPT2)),
    "gemma3": gemma3,
    "gemma3, a token for each patch": lambda: gemma3(16, sliding_window=20),
    "gemma3, spans wider than windows": lambda: gemma3(16, sliding_window=9),
}


def random_model(family: str) -> Any:
    model = FAMILIES[family]()
    randomize(model)
    return model.eval()


def pictures(model: Any, count: int, seed: int = 0) -> list[Tensor]:
    """Pixels [1, channels, S, S] of each."""
    size = model.config.vision_config.image_size
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 3, size, size, generator=generator) for _ in range(count)]
