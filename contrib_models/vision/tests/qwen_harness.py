"""Small Qwen2-VL and Qwen2.5-VL models of transformers, with random weights; and prompts with
pictures and videos of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import Array, MultiModalFeatureSpec, PlaceholderRange
from toolkit_lm.model import Model
from toolkit_lm.plugin import Plugins
from toolkit_lm.renderer import MultiModalRules
from toolkit_lm_devkit import randomize
from torch import Tensor
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    GlmOcrConfig,
    GlmOcrForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from vision_harness import sequences

VOCAB = 300
IMAGE = 7
VIDEO = 8
BEGIN = 5
END = 6
PATCH_VALUES = 3 * 2 * 4 * 4
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 7, 5]},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
TOWER = {
    "depth": 3,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
WINDOWED = {
    "intermediate_size": 80,
    "window_size": 24,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 2,
    "out_hidden_size": 64,
}


def qwen2_vl(*, tower: Any = None, tie_word_embeddings: bool = False, **text: Any) -> Any:
    vision = {**TOWER, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2, **(tower or {})}
    config = Qwen2VLConfig(
        text_config={**TEXT, **text},
        vision_config=vision,
        tie_word_embeddings=tie_word_embeddings,
        **TOKENS,
    )
    return Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl(*, tower: Any = None, tie_word_embeddings: bool = False, **text: Any) -> Any:
    vision = {**TOWER, "hidden_size": 64, **WINDOWED, **(tower or {})}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, **text},
        vision_config=vision,
        tie_word_embeddings=tie_word_embeddings,
        **TOKENS,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


LEARNED = {
    **TOWER,
    "hidden_size": 64,
    "intermediate_size": 80,
    "out_hidden_size": 64,
    "num_position_embeddings": 25,
}
HYBRID = {
    "head_dim": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    # Large, so that rounding stays invisible (see the tests of hybrid families).
    "rms_norm_eps": 0.4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
# All of them: a choice that rounding turns is an error of another kind.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 40}
MROPE = {
    "rope_type": "default",
    "rope_theta": 5e5,
    "mrope_section": [6, 5, 5],
    "mrope_interleaved": True,
}


def qwen3_vl(*, tower: Any = None, tie_word_embeddings: bool = False, **text: Any) -> Any:
    config = Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 32, "rope_parameters": MROPE, **text},
        vision_config={**LEARNED, "deepstack_visual_indexes": [0, 2], **(tower or {})},
        tie_word_embeddings=tie_word_embeddings,
        **TOKENS,
    )
    return Qwen3VLForConditionalGeneration(config)


def qwen3_vl_moe(**text: Any) -> Any:
    config = Qwen3VLMoeConfig(
        text_config={**TEXT, **EXPERTS, "head_dim": 32, "rope_parameters": MROPE, **text},
        vision_config={**LEARNED, "deepstack_visual_indexes": [1]},
        tie_word_embeddings=False,
        **TOKENS,
    )
    return Qwen3VLMoeForConditionalGeneration(config)


def qwen3_5(*, tie_word_embeddings: bool = False, **text: Any) -> Any:
    config = Qwen3_5Config(
        text_config={**TEXT, **HYBRID, **text},
        vision_config=LEARNED,
        tie_word_embeddings=tie_word_embeddings,
        **TOKENS,
    )
    return Qwen3_5ForConditionalGeneration(config)


def qwen3_5_moe(**text: Any) -> Any:
    config = Qwen3_5MoeConfig(
        text_config={**TEXT, **HYBRID, **SHARED, **text},
        vision_config=LEARNED,
        tie_word_embeddings=False,
        **TOKENS,
    )
    return Qwen3_5MoeForConditionalGeneration(config)


HALF = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [3, 3, 2],
}
GLM = {**TOWER, "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 80}
GLM_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": BEGIN,
    "image_end_token_id": END,
}


def glm4v(*, tie_word_embeddings: bool = False, **text: Any) -> Any:
    config = Glm4vConfig(
        text_config={**TEXT, "rope_parameters": HALF, **text},
        vision_config={**GLM, "image_size": 20},
        tie_word_embeddings=tie_word_embeddings,
        **GLM_TOKENS,
    )
    return Glm4vForConditionalGeneration(config)


def glm46v(*, tie_word_embeddings: bool = False, **text: Any) -> Any:
    config = Glm46VConfig(
        text_config={**TEXT, "model_type": "glm4v_text", "rope_parameters": HALF, **text},
        vision_config={**GLM, "model_type": "glm4v_vision", "image_size": 20},
        tie_word_embeddings=tie_word_embeddings,
        **GLM_TOKENS,
    )
    return Glm46VForConditionalGeneration(config)


def glm4v_moe(**text: Any) -> Any:
    config = Glm4vMoeConfig(
        text_config={
            **TEXT,
            "n_routed_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "rope_parameters": HALF,
            **text,
        },
        vision_config={**GLM, "image_size": 20},
        tie_word_embeddings=False,
        **GLM_TOKENS,
    )
    return Glm4vMoeForConditionalGeneration(config)


def glm_ocr(*, tie_word_embeddings: bool = False, **text: Any) -> Any:
    config = GlmOcrConfig(
        text_config={**TEXT, "head_dim": 32, "rope_parameters": HALF, **text},
        vision_config=GLM,
        tie_word_embeddings=tie_word_embeddings,
        **GLM_TOKENS,
    )
    return GlmOcrForConditionalGeneration(config)


FAMILIES = {
    "glm4v": glm4v,
    "glm46v": glm46v,
    "glm4v_moe": glm4v_moe,
    "glm_ocr": glm_ocr,
    "qwen2_vl": qwen2_vl,
    "qwen2_vl, tied, one patch a token": lambda: qwen2_vl(
        tower={"spatial_merge_size": 1}, tie_word_embeddings=True
    ),
    "qwen2_5_vl": qwen2_5_vl,
    "qwen2_5_vl, tied, windows of one token": lambda: qwen2_5_vl(
        tower={"window_size": 8}, tie_word_embeddings=True
    ),
    "qwen3_vl": qwen3_vl,
    "qwen3_vl, tied, three layers deep": lambda: qwen3_vl(
        tower={"deepstack_visual_indexes": [2, 0, 1], "spatial_merge_size": 1},
        tie_word_embeddings=True,
    ),
    "qwen3_vl_moe": qwen3_vl_moe,
}
HYBRIDS = {"qwen3_5": qwen3_5, "qwen3_5_moe": qwen3_5_moe}
"""Recurrent layers need an engine."""
BY_NIGHT = ("glm46v", "qwen3_vl, tied, three layers deep", "qwen3_vl_moe", "qwen3_5_moe")


def by_day(*names: str) -> list[Any]:
    """Names as parameters of a test, some of them by night only."""
    return [
        pytest.param(name, marks=pytest.mark.nightly if name in BY_NIGHT else ()) for name in names
    ]


def reads_videos(theirs: Any) -> bool:
    """Whether videos need no times."""
    return theirs.config.model_type in ("qwen2_vl", "qwen2_5_vl")


def is_glm(theirs: Any) -> bool:
    """Whether frames of videos are pictures. Then transformers takes no pictures beside videos."""
    return str(theirs.config.model_type).startswith("glm")


def random_qwen(family: str) -> Any:
    model = (FAMILIES | HYBRIDS)[family]()
    randomize(model)
    if not model.config.tie_word_embeddings:
        with torch.no_grad():
            # An answer with the token of a picture would ask transformers for its pixels.
            model.lm_head.weight[[IMAGE, VIDEO]] = 0
    # Pixels of a patch are many, and a random tower is no trained one.
    with torch.no_grad():
        model.model.visual.patch_embed.proj.weight.mul_(0.3)
    return model.eval()


def rules_of(theirs: Any) -> MultiModalRules:
    """Our rules of a model of transformers."""
    config = VllmConfig.default(
        theirs.config.to_dict() | {"architectures": [type(theirs).__name__]}
    )
    rules: MultiModalRules = Plugins.load().models.load_multimodal(type(theirs).__name__)(config)
    return rules


class Item(NamedTuple):
    """A picture or a video, as the processors of transformers give it."""

    modality: str
    data: dict[str, np.ndarray]

    @property
    def pixels(self) -> np.ndarray:
        return self.data["pixel_values" if self.modality == "image" else "pixel_values_videos"]

    @property
    def grid(self) -> np.ndarray:
        return self.data[f"{self.modality}_grid_thw"]


def picture(h: int, w: int, seed: int = 0) -> Item:
    """Picture of h x w patches."""
    pixels = np.random.default_rng([h, w, seed]).standard_normal((h * w, PATCH_VALUES), np.float32)
    return Item("image", {"pixel_values": pixels, "image_grid_thw": np.array([[1, h, w]])})


def timed_video(t: int, h: int, w: int) -> Item:
    """Of Qwen3-VL or GLM: each frame has a time, of one token more than the last one's."""
    item = video(t, h, w)
    ids = np.array([[40 + k if k <= frame else -1 for k in range(t)] for frame in range(t)])
    return Item("video", {**item.data, "timestamps": np.arange(t) / 2, "timestamp_ids": ids})


def video(t: int, h: int, w: int, seconds: float | None = None) -> Item:
    pixels = np.random.default_rng([t, h, w]).standard_normal((t * h * w, PATCH_VALUES), np.float32)
    data = {"pixel_values_videos": pixels, "video_grid_thw": np.array([[t, h, w]])}
    return Item(
        "video", data if seconds is None else {**data, "second_per_grid_ts": np.array([seconds])}
    )


class Prompt(NamedTuple):
    """Tokens of text, with items among them."""

    token_ids: list[int]
    items: list[Item]
    features: list[MultiModalFeatureSpec]


def prompt_of(rules: MultiModalRules, *parts: list[int] | Item) -> Prompt:
    """Prompt of tokens and items, in this order. An item's replacement is that of the rules,
    between the tokens that checkpoints put there."""
    prompt = Prompt([], [], [])
    for part in parts:
        if isinstance(part, list):
            prompt.token_ids.extend(part)
            continue
        found = rules.replacement(part.modality, part.data)
        place = PlaceholderRange(
            offset=len(prompt.token_ids) + 1, length=len(found.token_ids), mask=found.mask
        )
        prompt.token_ids.extend([BEGIN, *found.token_ids, END])
        data = {name: Array.of(array) for name, array in part.data.items()}
        name = f"{part.modality} {part.pixels.tobytes()!r}"
        prompt.features.append(
            MultiModalFeatureSpec(
                modality=part.modality,
                mm_identifier=name[:200],
                mm_position=place,
                data=data,
                layout=found.layout,
            )
        )
        prompt.items.append(part)
    return prompt


def arguments(prompt: Prompt) -> dict[str, Any]:
    """Inputs of transformers other than input_ids."""
    types = torch.zeros(1, len(prompt.token_ids), dtype=torch.int64)
    for feature in prompt.features:
        at = feature.mm_position
        mask = torch.tensor([True] * at.length if at.mask is None else list(at.mask))
        found = types[0, at.offset : at.offset + at.length]
        found[mask] = {"image": 1, "video": 2}[feature.modality]
    given: dict[str, Any] = {"mm_token_type_ids": types}
    for modality, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if some := [item for item in prompt.items if item.modality == modality]:
            given[pixels] = torch.from_numpy(np.concatenate([item.pixels for item in some]))
            given[f"{modality}_grid_thw"] = torch.from_numpy(
                np.concatenate([item.grid for item in some])
            )
    seconds = [
        float(item.data["second_per_grid_ts"][0])
        for item in prompt.items
        if "second_per_grid_ts" in item.data
    ]
    return given | ({"second_per_grid_ts": seconds} if seconds else {})


@torch.inference_mode()
def encoded(model: Model, items: Sequence[Item]) -> list[Tensor]:
    """Embeddings of each, those of a modality in one go."""
    found: dict[int, Tensor] = {}
    for modality in {item.modality for item in items}:
        places = [place for place, item in enumerate(items) if item.modality == modality]
        given = [
            {name: torch.from_numpy(array) for name, array in items[place].data.items()}
            for place in places
        ]
        found |= dict(
            zip(
                places,
                model.encode_items(modality, given, lambda lengths: sequences(model, lengths)),
                strict=True,
            )
        )
    return [found[place] for place in range(len(items))]


@torch.inference_mode()
def logits_of_prompts(model: Model, prompts: Sequence[Prompt]) -> list[Tensor]:
    """Logits [Ti, V] at each token of each prompt, all computed in one step."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    input_ids = torch.tensor([token for prompt in prompts for token in prompt.token_ids])
    embeds = model.embed_input_ids(input_ids)
    if items := [item for prompt in prompts for item in prompt.items]:
        embeds[(input_ids == IMAGE) | (input_ids == VIDEO)] = torch.cat(encoded(model, items))
    positions = np.concatenate(
        [model.prompt_positions(np.array(one.token_ids), one.features) for one in prompts], axis=1
    )
    with sequences(model, lengths):
        hidden = model(input_ids, torch.from_numpy(positions), inputs_embeds=embeds)
    return list(model.compute_logits(hidden).split(lengths))
