"""PatchShape: what a checkpoint's `vision_config` says of a tower that reads pictures and videos of
any size. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HFConfig

_COMMON = {
    "depth": 32,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_LEARNED = {
    **_COMMON,
    "depth": 27,
    "patch_size": 16,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "hidden_act": "gelu_pytorch_tanh",
    "num_position_embeddings": 2304,
}
_GLM = {
    **_COMMON,
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "num_heads": 12,
    "image_size": 336,
    "rms_norm_eps": 1e-5,
    "out_hidden_size": 4096,
    "intermediate_size": 13696,
    "attention_bias": False,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        **_COMMON,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
    },
    "qwen2_5_vl": {
        **_COMMON,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "hidden_act": "silu",
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 4,
    },
    "qwen3_vl": {**_LEARNED, "deepstack_visual_indexes": [8, 16, 24]},
    "qwen3_5": _LEARNED,
    "glm4v": _GLM,
    "glm_ocr": {
        **_GLM,
        "hidden_size": 1024,
        "num_heads": 16,
        "out_hidden_size": 1536,
        "intermediate_size": 4096,
        "attention_bias": True,
    },
}
"""Defaults of transformers by kind of tower, for keys that a config leaves out."""


class Grid(NamedTuple):
    """Patches of an item in time, height and width."""

    t: int
    h: int
    w: int

    @property
    def num_patches(self) -> int:
        return self.t * self.h * self.w


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchShape:
    """Shape of a tower of Qwen-VL and GLM-V models: Qwen2-VL's; Qwen2.5-VL's, which has windows;
    Qwen3-VL's and Qwen3.5's, which have learned positions; GLM-4V's; or GLM-OCR's."""

    hidden_size: int
    inner_size: int
    out_size: int
    """Size of the language model's embeddings."""
    num_layers: int
    num_heads: int
    patch_values: int
    """Numbers of a patch: channels, frames, height, width."""
    merge: int
    """A square of merge x merge patches is one token."""
    activation: str
    theta: float
    window: int = 0
    """Tokens per side of a window; 0: no windows."""
    full_layers: tuple[int, ...] = ()
    """Layers without windows."""
    tokens_per_second: int | None = None
    """Positions of a second of video; None: a frame's position is its place."""
    num_positions: int = 0
    """Learned positions of patches, those of a square; 0: none."""
    deep_layers: tuple[int, ...] = ()
    """Layers whose states are added after the language model's first layers (DeepStack)."""
    rms_eps: float | None = None
    """Epsilon of RMS norms; None: norms are layer norms. A tower with RMS norms has gated
    feed-forwards."""
    has_patch_bias: bool = False
    """Whether the projection of patches has a bias."""
    has_qkv_bias: bool = True
    has_bias: bool = True
    """Whether attention's output and the feed-forward have biases."""
    has_head_norms: bool = False
    """Whether queries and keys are normed by head."""
    merger_size: int = 0
    """Inner size of the merger's feed-forward; 0: that of a merged square."""

    @classmethod
    def read(cls, hf_config: Mapping[str, Any], kind: str) -> PatchShape:
        """Reads a config.json with a `vision_config` of a kind in `_DEFAULTS`. Raises
        CheckpointError."""
        vision_config: dict[str, Any] = HFConfig(hf_config).require("vision_config", dict)
        config = HFConfig(
            {
                **_DEFAULTS[kind],
                **{key: value for key, value in vision_config.items() if value is not None},
            }
        )
        is_first = kind == "qwen2_vl"
        size = config.require("embed_dim" if is_first else "hidden_size", int)
        patch = config.require("patch_size", int)
        merge = config.require("spatial_merge_size", int)
        fields: dict[str, Any] = {
            "hidden_size": size,
            "inner_size": int(size * config.require("mlp_ratio", float))
            if is_first
            else config.require("intermediate_size", int),
            "out_size": config.require("hidden_size" if is_first else "out_hidden_size", int),
            "num_layers": config.require("depth", int),
            "num_heads": config.require("num_heads", int),
            "patch_values": config.require("in_channels", int)
            * config.require("temporal_patch_size", int)
            * patch**2,
            "merge": merge,
            "activation": config.require("hidden_act", str),
            "theta": HFConfig(config.get("rope_parameters", dict, {})).get(
                "rope_theta", float, 10000.0
            ),
        }
        shape = cls(**(fields | cls._own(config, kind)))
        shape._check()
        return shape

    @classmethod
    def _own(cls, config: HFConfig, kind: str) -> dict[str, Any]:
        """Fields that only some kinds of towers have."""
        if kind == "qwen2_5_vl":
            divisor = config.require("spatial_merge_size", int) * config.require("patch_size", int)
            return {
                # Below 0 where there is none: `_check` refuses it.
                "window": config.require("window_size", int) // max(divisor, 1) or -1,
                "full_layers": tuple(config.require("fullatt_block_indexes", list)),
                "tokens_per_second": config.require("tokens_per_second", int),
                "rms_eps": 1e-6,
            }
        if kind in ("glm4v", "glm_ocr"):
            return cls._of_glm(config, is_ocr=kind == "glm_ocr")
        if "num_position_embeddings" not in _DEFAULTS[kind]:
            return {}
        deep = config.get("deepstack_visual_indexes", list, []) if kind == "qwen3_vl" else []
        return {
            "num_positions": config.require("num_position_embeddings", int) or -1,
            "deep_layers": tuple(deep),
            "has_patch_bias": True,
        }

    @staticmethod
    def _of_glm(config: HFConfig, *, is_ocr: bool) -> dict[str, Any]:
        """GLM-OCR's tower has head norms, and no learned positions."""
        out = config.require("out_hidden_size", int)
        inner = config.require("intermediate_size", int)
        biased = config.require("attention_bias", bool)
        side = config.require("image_size", int) // max(config.require("patch_size", int), 1)
        return {
            "inner_size": inner if is_ocr else out,
            "merger_size": out * config.require("in_channels", int) if is_ocr else inner,
            "num_positions": 0 if is_ocr else side**2 or -1,
            "rms_eps": config.require("rms_norm_eps", float),
            "has_patch_bias": True,
            "has_qkv_bias": biased,
            "has_bias": is_ocr and biased,
            "has_head_norms": is_ocr,
        }

    def _check(self) -> None:
        sizes = (
            self.hidden_size,
            self.inner_size,
            self.out_size,
            self.num_layers,
            self.num_heads,
            self.patch_values,
            self.merge,
        )
        if (
            min(*sizes, self.window + 1, self.num_positions + 1, self.merger_size + 1) < 1
            or self.hidden_size % (4 * self.num_heads)
            or self.num_layers > 2**10
            or max(*sizes, self.num_positions, self.merger_size) > 2**24
            or isqrt(max(self.num_positions, 0)) ** 2 != self.num_positions
            or len(set(self.deep_layers)) < len(self.deep_layers)
            or not set(self.deep_layers) <= set(range(self.num_layers))
        ):
            raise CheckpointError(
                f"config.json: 'vision_config' describes no vision tower: {self}."
            )

    @property
    def embed_size(self) -> int:
        """Length of a token's embedding: those of DeepStack follow that of the merged states."""
        return self.out_size * (1 + len(self.deep_layers))

    def num_tokens(self, grid: Grid) -> int:
        """Number of tokens of an item."""
        return grid.num_patches // self.merge**2

    def interval(self, seconds: float | None) -> np.float32:
        """Positions from one frame of an item to the next; `seconds` lie between them, of a
        video."""
        return np.float32(
            1
            if seconds is None or self.tokens_per_second is None
            else self.tokens_per_second * seconds
        )

    def positions(self, grid: Grid, interval: np.float32) -> np.ndarray:
        """[3, tokens] int64: of an item's tokens in time, height and width, from 0 on."""
        times = (np.arange(grid.t, dtype=np.float32) * interval).astype(np.int64)
        places = np.meshgrid(
            times, np.arange(grid.h // self.merge), np.arange(grid.w // self.merge), indexing="ij"
        )
        return np.stack([place.ravel() for place in places]).astype(np.int64)
