"""ModernVBERT's config.json in the form of Idefics3's, and prompt rules of ColModernVBERT. Imports
no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig

from toolkit_lm_vision.idefics3_rules import Idefics3Rules
from toolkit_lm_vision.retrieval_rules import language_and_vision

_TEXT = {
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "vocab_size": 50_368,
}
_VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}
_IMAGE = 50_407


def like_idefics3(config: VllmConfig) -> VllmConfig:
    """The config of a ModernVBERT model, by the keys of Idefics3, with transformers' defaults.
    Raises CheckpointError."""
    assert config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
    own = HFConfig(config.hf_config)
    hf_config: dict[str, Any] = {
        **config.hf_config,
        "text_config": _stated(_TEXT, own.require("text_config", dict)),
        "vision_config": _stated(_VISION, own.require("vision_config", dict)),
        "scale_factor": own.get("pixel_shuffle_factor", int, 4),
        "image_token_id": own.get("image_token_id", int, _IMAGE),
    }
    return config.with_checkpoint(msgspec.structs.replace(config.checkpoint, hf_config=hf_config))


def _stated(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {**defaults, **{key: value for key, value in own.items() if value is not None}}


class ColModernVBertRules(Idefics3Rules):
    """Rules of Idefics3, whose tiles and marks its pictures have."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(like_idefics3(language_and_vision(config)))
