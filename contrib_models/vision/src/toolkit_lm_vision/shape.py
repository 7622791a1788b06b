"""VisionShape: what a checkpoint's `vision_config` says of its vision tower. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.model import HFConfig

_SIZES = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "clip_vision_model": {
        **_SIZES,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    "siglip_vision_model": {
        **_SIZES,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
}
"""Defaults of transformers by model_type, for keys that a config leaves out."""
_MOST = {
    "hidden_size": 2**16,
    "intermediate_size": 2**18,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**10,
    "num_channels": 2**4,
    "image_size": 2**12,
    "patch_size": 2**10,
}
"""Far more than any tower has."""
_MOST_PATCHES = 2**16


def text_size(text: Mapping[str, Any]) -> int:
    """The hidden size that a `text_config` states. Raises CheckpointError where it states none."""
    config = HFConfig(text)
    return (
        config.get("n_embd", int)
        or config.get("d_model", int)
        or config.require("hidden_size", int)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """Shape of a tower that reads square pictures of one size."""

    is_clip: bool
    """CLIP's: a state of the whole picture stands before those of its patches. Otherwise it is
    SigLIP's."""
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    activation: str
    eps: float

    @classmethod
    def read(cls, hf_config: Mapping[str, Any]) -> VisionShape:
        """Reads a config.json with a `vision_config`. Raises CheckpointError, and UnsupportedError
        for another kind of tower."""
        audio_config: dict[str, Any] = HFConfig(hf_config).require("vision_config", dict)
        kind = HFConfig(audio_config).get("model_type", str, "clip_vision_model")
        if kind not in _DEFAULTS:
            raise UnsupportedError(
                f"config.json: there is no vision tower of model_type {kind!r}, only of "
                f"{' and '.join(_DEFAULTS)}."
            )
        config = HFConfig(
            {
                **_DEFAULTS[kind],
                **{key: value for key, value in audio_config.items() if value is not None},
            }
        )
        for name, most in _MOST.items():
            if not 1 <= config.require(name, int) <= most:
                raise CheckpointError(
                    f"config.json: {name} of 'vision_config' must be from 1 to {most}, not "
                    f"{config.values[name]}."
                )
        shape = cls(
            is_clip=kind == "clip_vision_model",
            hidden_size=config.require("hidden_size", int),
            inner_size=config.require("intermediate_size", int),
            num_layers=config.require("num_hidden_layers", int),
            num_heads=config.require("num_attention_heads", int),
            num_channels=config.require("num_channels", int),
            image_size=config.require("image_size", int),
            patch_size=config.require("patch_size", int),
            activation=config.require("hidden_act", str),
            eps=config.require("layer_norm_eps", float),
        )
        if not 0 < shape.num_patches <= _MOST_PATCHES or shape.hidden_size % shape.num_heads:
            raise CheckpointError(
                f"config.json: 'vision_config' describes no vision tower: {shape}."
            )
        return shape

    @property
    def side(self) -> int:
        """Patches of a picture's side."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.side**2

    @property
    def num_states(self) -> int:
        """Number of states of a picture."""
        return self.num_patches + self.is_clip

    @property
    def picture(self) -> tuple[int, int, int]:
        """Shape of the pixels of one."""
        return self.num_channels, self.image_size, self.image_size
