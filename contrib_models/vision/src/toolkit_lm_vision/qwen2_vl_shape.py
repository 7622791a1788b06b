"""PatchShape: what a checkpoint's `vision_config` says of a tower that reads pictures and videos of
any size. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
_DEFAULTS: dict[bool, dict[str, Any]] = {
    False: {
        **_COMMON,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
    },
    True: {
        **_COMMON,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "hidden_act": "silu",
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 4,
    },
}
"""Defaults of transformers for keys that a config leaves out: Qwen2-VL (False) and Qwen2.5-VL
(True)."""


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
    """Shape of Qwen2-VL's tower, or of Qwen2.5-VL's, which has windows."""

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
    window: int
    """Tokens per side of a window; 0: no windows."""
    full_layers: tuple[int, ...]
    """Layers without windows."""
    tokens_per_second: int | None
    """Positions of a second of video; None: a frame's position is its place."""

    @classmethod
    def read(cls, hf_config: Mapping[str, Any], *, windowed: bool) -> PatchShape:
        """Reads a config.json with a `vision_config`. Raises CheckpointError."""
        audio_config: dict[str, Any] = HFConfig(hf_config).require("vision_config", dict)
        config = HFConfig(
            {
                **_DEFAULTS[windowed],
                **{key: value for key, value in audio_config.items() if value is not None},
            }
        )
        size = config.require("hidden_size" if windowed else "embed_dim", int)
        patch = config.require("patch_size", int)
        merge = config.require("spatial_merge_size", int)
        shape = cls(
            hidden_size=size,
            inner_size=config.require("intermediate_size", int)
            if windowed
            else int(size * config.require("mlp_ratio", float)),
            out_size=config.require("out_hidden_size" if windowed else "hidden_size", int),
            num_layers=config.require("depth", int),
            num_heads=config.require("num_heads", int),
            patch_values=config.require("in_channels", int)
            * config.require("temporal_patch_size", int)
            * patch**2,
            merge=merge,
            activation=config.require("hidden_act", str),
            theta=HFConfig(config.get("rope_parameters", dict, {})).get(
                "rope_theta", float, 10000.0
            ),
            window=config.require("window_size", int) // merge // patch
            if windowed and min(merge, patch) > 0
            else 0,
            full_layers=tuple(config.require("fullatt_block_indexes", list)) if windowed else (),
            tokens_per_second=config.require("tokens_per_second", int) if windowed else None,
        )
        sizes = (
            shape.hidden_size,
            shape.inner_size,
            shape.out_size,
            shape.num_layers,
            shape.num_heads,
            shape.patch_values,
            merge,
        )
        least = min(*sizes, shape.window if windowed else 1)
        if (
            least < 1
            or shape.hidden_size % (4 * shape.num_heads)
            or shape.num_layers > 2**10
            or max(sizes) > 2**24
        ):
            raise CheckpointError(
                f"config.json: 'vision_config' describes no vision tower: {shape}."
            )
        return shape

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
