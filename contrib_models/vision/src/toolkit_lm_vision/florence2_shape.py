"""DaViTShape: what a Florence-2 checkpoint's `vision_config` says of its tower. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HFConfig

_STAGES: dict[str, tuple[Any, int]] = {
    "depths": ((1, 1, 9, 1), 2**7),
    "patch_size": ((7, 3, 3, 3), 2**6),
    "patch_stride": ((4, 2, 2, 2), 2**6),
    "patch_padding": ((3, 1, 1, 1), 2**6),
    "patch_prenorm": ((False, True, True, True), True),
    "embed_dim": ((128, 256, 512, 1024), 2**16),
    "num_heads": ((4, 8, 16, 32), 2**10),
    "num_groups": ((4, 8, 16, 32), 2**10),
}
"""Fields with a value of each stage: defaults of transformers, and far more than any tower has."""
_SIZES = {
    "in_channels": (3, 2**4),
    "window_size": (12, 2**8),
    "projection_dim": (1024, 2**16),
    "max_temporal_embeddings": (100, 2**16),
    "max_position_embeddings": (50, 2**9),
}
"""Fields with one value, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Sizes of a stage: a convolution, and pairs of a block of windows and one of channels."""

    in_channels: int
    channels: int
    kernel: int
    stride: int
    padding: int
    norms_first: bool
    """A norm precedes the convolution; otherwise it follows."""
    depth: int
    num_heads: int
    num_groups: int

    def side(self, side: int) -> int:
        """Length of a side after the convolution."""
        return (side + 2 * self.padding - self.kernel) // self.stride + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DaViTShape:
    """Shape of the tower and of the layers that project its states."""

    stages: tuple[Stage, ...]
    window: int
    """Side of a window."""
    mlp_ratio: float
    has_qkv_bias: bool
    activation: str
    projected_size: int
    max_side: int
    """Most rows or columns of states that have positions."""
    max_frames: int

    @classmethod
    def read(cls, hf_config: Mapping[str, Any]) -> DaViTShape:
        """Reads a config.json with a `vision_config`. Raises CheckpointError."""
        config = HFConfig(HFConfig(hf_config).require("vision_config", dict))
        lists = {name: _of_stages(config, name, *known) for name, known in _STAGES.items()}
        if len({len(values) for values in lists.values()}) > 1:
            counts = ", ".join(f"{name} {len(values)}" for name, values in lists.items())
            raise CheckpointError(f"config.json: 'vision_config' has unlike stages: {counts}.")
        sizes = {name: _size(config, name, *known) for name, known in _SIZES.items()}
        inputs = (sizes["in_channels"], *lists["embed_dim"])
        stages = tuple(
            Stage(
                in_channels=inputs[index],
                channels=lists["embed_dim"][index],
                kernel=lists["patch_size"][index],
                stride=lists["patch_stride"][index],
                padding=lists["patch_padding"][index],
                norms_first=lists["patch_prenorm"][index],
                depth=lists["depths"][index],
                num_heads=lists["num_heads"][index],
                num_groups=lists["num_groups"][index],
            )
            for index in range(len(lists["depths"]))
        )
        for stage in stages:
            for name, count in (("num_heads", stage.num_heads), ("num_groups", stage.num_groups)):
                if stage.channels % count:
                    raise CheckpointError(
                        f"config.json: 'embed_dim' {stage.channels} of 'vision_config' must be a "
                        f"multiple of {name!r} {count}."
                    )
        ratio = config.get("mlp_ratio", float, 4.0)
        if not 0 < ratio <= 2**6:
            raise CheckpointError(f"config.json: 'mlp_ratio' must be from 0 to 64, not {ratio}.")
        return cls(
            stages=stages,
            window=sizes["window_size"],
            mlp_ratio=ratio,
            has_qkv_bias=config.get("qkv_bias", bool, True),
            activation=config.get("activation_function", str, "gelu"),
            projected_size=sizes["projection_dim"],
            max_side=sizes["max_position_embeddings"],
            max_frames=sizes["max_temporal_embeddings"],
        )

    @property
    def num_channels(self) -> int:
        """Channels of a picture."""
        return self.stages[0].in_channels

    @property
    def last_size(self) -> int:
        """Size of the tower's states."""
        return self.stages[-1].channels

    def sides(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of states of a picture; below 1: it is too small."""
        for stage in self.stages:
            height, width = stage.side(height), stage.side(width)
        return height, width

    def num_tokens(self, height: int, width: int) -> int:
        """Number of tokens of a picture of this size: one of all, and one of each state. 0: the
        tower takes none of this size."""
        sides = self.sides(height, width)
        return prod(sides) + 1 if all(1 <= side <= self.max_side for side in sides) else 0

    def picture(self, num_tokens: int) -> tuple[int, int, int] | None:
        """Shape of the pixels of the largest usual picture with at most `num_tokens` tokens: of at
        most 24 x 24 states. None: there is none."""
        step = prod(stage.stride for stage in self.stages)
        for states in range(min(24, self.max_side), 0, -1):
            side = states * step
            if 0 < self.num_tokens(side, side) <= num_tokens:
                return self.num_channels, side, side
        return None


def _of_stages(config: HFConfig, name: str, default: Any, most: int) -> list[Any]:
    values = config.values.get(name)
    values = list(default) if values is None else values
    kind = type(most)
    least = 0 if kind is bool or name == "patch_padding" else 1
    if (
        not isinstance(values, list)
        or not values
        or len(values) > 2**5
        or not all(type(value) is kind and least <= value <= most for value in values)
    ):
        expected = "true or false" if kind is bool else f"integers from {least} to {most}"
        raise CheckpointError(
            f"config.json: {name!r} of 'vision_config' must be a list of {expected}, not "
            f"{values!r:.100}."
        )
    return values


def _size(config: HFConfig, name: str, default: int, most: int) -> int:
    size = config.get(name, int, default)
    if not 1 <= size <= most:
        raise CheckpointError(
            f"config.json: {name!r} of 'vision_config' must be from 1 to {most}, not {size}."
        )
    return size
