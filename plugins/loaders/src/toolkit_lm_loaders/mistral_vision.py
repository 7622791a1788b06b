"""The vision part of params.json: Pixtral's tower, in Pixtral (LLaVA) and in Mistral 3. Importing
it needs no torch."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit_lm.errors import CheckpointError

VISION = "vision_encoder"
_NEEDED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("image_size", "patch_size"),
)
"""Keys that it must have. config.json has the same names."""
_OTHERS = {
    *("num_channels", "rope_theta", "adapter_bias", "spatial_merge_size", "max_image_size"),
    *("mm_projector_id", "add_pre_mm_projector_layer_norm"),
    *("image_token_id", "image_break_token_id", "image_end_token_id"),
}
_PATCH_MERGE = "patch_merge"


def vision_config(text: Mapping[str, Any], path: Path, vision: Any) -> dict[str, Any]:
    """The config.json of a model with a tower. `text`: of its language part; `vision`: value of
    VISION in the params.json at `path`. Raises CheckpointError for keys that change the tower."""
    if not isinstance(vision, Mapping):
        raise CheckpointError(f"{path}: {VISION} must be an object, not {reprlib.repr(vision)}.")
    if missing := [key for key in _NEEDED if type(vision.get(key)) is not int]:
        raise CheckpointError(f"{path}: {VISION} lacks {', '.join(missing)}: integers.")
    if unknown := [key for key, value in vision.items() if value and key not in _known()]:
        raise CheckpointError(
            f"{path}: {unknown[0]} of {VISION} is {reprlib.repr(vision[unknown[0]])}, which is not "
            f"read. Known: {', '.join(sorted(_known()))}."
        )
    tower = {
        **{key: vision[key] for key in _NEEDED},
        "model_type": "pixtral",
        "num_channels": vision.get("num_channels") or 3,
        "hidden_act": "silu",
        "rope_theta": float(vision.get("rope_theta") or 10000.0),
    }
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": dict(text),
        "vision_config": tower,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_index": vision.get("image_token_id", 10),
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": bool(vision.get("adapter_bias", True)),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        **{key: text[key] for key in ("torch_dtype", "bos_token_id", "eos_token_id")},
    }
    if _merge_size(vision, path) is not None:
        config |= {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "spatial_merge_size": vision["spatial_merge_size"],
        }
    return config


def processor_files(config: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of transformers' files that say how pictures are processed, by file name. `config`:
    what `vision_config` makes of `vision`."""
    side = vision["patch_size"]
    size = {"longest_edge": vision.get("max_image_size") or vision["image_size"]}
    patch = {"height": side, "width": side}
    return {
        "preprocessor_config.json": {
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": patch,
            "size": size,
        },
        "processor_config.json": {
            "processor_class": "PixtralProcessor",
            "patch_size": side,
            "spatial_merge_size": config.get("spatial_merge_size", 1),
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
    }


def _known() -> set[str]:
    return {*_NEEDED, *_OTHERS}


def _merge_size(vision: Mapping[str, Any], path: Path) -> int | None:
    """Patches on a side of a token in Mistral 3; None in Pixtral, which merges none."""
    merges = vision.get("mm_projector_id") == _PATCH_MERGE
    normed = bool(vision.get("add_pre_mm_projector_layer_norm"))
    size = vision.get("spatial_merge_size") or 1
    if not merges and not normed and size == 1 and not vision.get("mm_projector_id"):
        return None
    if merges and normed and type(size) is int:
        return size
    stated = {
        key: vision.get(key)
        for key in ("mm_projector_id", "add_pre_mm_projector_layer_norm", "spatial_merge_size")
    }
    raise CheckpointError(
        f"{path}: {VISION} has {reprlib.repr(stated)}: either all of them are there, as in Mistral "
        f"3, with mm_projector_id {_PATCH_MERGE!r}, or none, as in Pixtral."
    )
