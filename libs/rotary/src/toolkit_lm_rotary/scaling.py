"""Inverse frequencies of rotary position embeddings (Su et al. 2021), for every way of stretching
them to longer contexts.

Names are those of `rope_parameters` in a checkpoint's config.json. Results equal those of
transformers to the last bit, so expressions are not simplified. Far into a context, the last bit of
a frequency is a visible angle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from toolkit_lm.errors import CheckpointError, UnsupportedError, nearest
from toolkit_lm.model import HFConfig
from torch import Tensor

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """A checkpoint's parameters of rotary embedding, for layers of one kind."""

    rope_type: str
    head_size: int
    max_position_embeddings: int
    values: HFConfig
    """The `rope_parameters` themselves."""

    @classmethod
    def read(
        cls, config: HFConfig, head_size: int, *, layer_type: str | None = None
    ) -> RopeParameters:
        """Reads config.json: `rope_parameters`, or the older `rope_theta` and `rope_scaling`, which
        goes first where there are both.

        `layer_type` picks one where layers differ. Raises UnsupportedError for an unknown
        rope_type, CheckpointError for a missing value.
        """
        nothing: dict[str, Any] = {}
        rope = config.get("rope_scaling", dict, nothing) or config.get(
            "rope_parameters", dict, nothing
        )
        if layer_type is not None and isinstance(rope.get(layer_type), Mapping):
            rope = rope[layer_type]
        rope_type = str(rope.get("rope_type") or rope.get("type") or "default")
        # LongRoPE's first name; and that of default angles by three positions, of which
        # `mrope_section` speaks.
        rope_type = {"su": "longrope", "mrope": "default"}.get(rope_type, rope_type)
        if rope_type not in _SCALINGS:
            raise UnsupportedError(
                f"config.json: unknown rope_type {rope_type!r}. {nearest(rope_type, _SCALINGS)}"
            )
        max_positions = config.require("max_position_embeddings", int)
        values = {
            "rope_theta": config.get("rope_theta", float, DEFAULT_THETA),
            "partial_rotary_factor": config.get("partial_rotary_factor", float, 1.0),
            "original_max_position_embeddings": max_positions,
        }
        values |= {key: value for key, value in rope.items() if value is not None}
        # Phi-3 and its kin state it beside rope_parameters, and mean that one.
        if original := config.get("original_max_position_embeddings", int):
            values["original_max_position_embeddings"] = original
        return cls(rope_type, head_size, max_positions, HFConfig(values))

    @property
    def theta(self) -> float:
        return self.values.require("rope_theta", float)

    @property
    def original_max_positions(self) -> int:
        """The context that the model was first trained on."""
        return self.values.require("original_max_position_embeddings", int)

    @property
    def rotary_size(self) -> int:
        """How many dimensions of a head are rotated."""
        return int(self.head_size * self.values.require("partial_rotary_factor", float))

    @property
    def stretch(self) -> float:
        """Growth of the context since the first training: `factor`, or the ratio of the two
        lengths."""
        return (
            self.values.get("factor", float)
            or self.max_position_embeddings / self.original_max_positions
        )

    def inverse_frequencies(self, max_len: int) -> tuple[Tensor, float]:
        """Radians per position [rotated dimensions / 2] in float32, and the factor of cosines and
        sines.

        `max_len` is the longest sequence there will be: "dynamic" and "longrope" depend on it.
        transformers uses the length so far, and rotates later keys by other angles than the cached
        ones. Here all keys of an engine are rotated alike. Raises CheckpointError for values that
        give no angles.
        """
        try:
            frequencies, attention_factor = _SCALINGS[self.rope_type](self, max_len)
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"no angles of {self.rope_type!r} rotary embeddings: {error}"
            ) from error
        if not frequencies.is_meta and not (frequencies * attention_factor).isfinite().all():
            raise CheckpointError(
                f"config.json: the angles of its {self.rope_type!r} rotary embeddings are not "
                "finite."
            )
        return frequencies, attention_factor


def _radii(theta: float, size: int) -> Tensor:
    """Positions per radian."""
    return theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)


def _frequencies(theta: float, size: int) -> Tensor:
    return 1.0 / _radii(theta, size)


def _default(rope: RopeParameters, max_len: int) -> tuple[Tensor, float]:
    return _frequencies(rope.theta, rope.rotary_size), 1.0


def _linear(rope: RopeParameters, max_len: int) -> tuple[Tensor, float]:
    return _frequencies(rope.theta, rope.rotary_size) / rope.values.require("factor", float), 1.0


def _proportional(rope: RopeParameters, max_len: int) -> tuple[Tensor, float]:
    """The frequencies of the whole head, of which the slowest are zero."""
    frequencies = _frequencies(rope.theta, rope.head_size)
    frequencies[
        int(rope.values.require("partial_rotary_factor", float) * rope.head_size // 2) :
    ] = 0
    return frequencies / rope.values.get("factor", float, 1.0), 1.0


def _dynamic(rope: RopeParameters, max_len: int) -> tuple[Tensor, float]:
    """NTK-aware: the base grows with the length."""
    factor = rope.values.require("factor", float)
    size = rope.rotary_size
    length = max(max_len, rope.max_position_embeddings)
    trained = rope.max_position_embeddings
    return _frequencies(
        rope.theta * (factor * length / trained - (factor - 1)) ** (size / (size - 2)), size
    ), 1.0


def _llama3(rope: RopeParameters, max_len: int) -> tuple[Tensor, float]:
    """Slow frequencies are divided by `factor`, fast ones kept, those between blended."""
    factor = rope.values.require("factor", float)
    low = rope.values.require("low_freq_factor", float)
    high = rope.values.require("high_freq_factor", float)
    frequencies = _frequencies(rope.theta, rope.rotary_size)
    rotations = rope.original_max_positions / (2 * math.pi / frequencies)
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies, 1.0


def _yarn(rope: RopeParameters, max_len: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): as llama3, blended linearly over the dimensions; and attention is
    sharpened."""
    values = rope.values
    size = rope.rotary_size

    def dimension(rotations: float) -> float:
        """Dimension whose frequency makes `rotations` rotations over the original context."""
        return (
            size
            * math.log(rope.original_max_positions / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = dimension(values.get("beta_fast", float) or 32)
    high = dimension(values.get("beta_slow", float) or 1)
    if values.get("truncate", bool, True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    span = high - low or 0.001
    kept = 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    radii = _radii(rope.theta, size)
    return 1.0 / (rope.stretch * radii) * (1 - kept) + 1.0 / radii * kept, _yarn_attention_factor(
        rope
    )


def _yarn_attention_factor(rope: RopeParameters) -> float:
    values = rope.values
    stretch = rope.stretch
    if (attention_factor := values.get("attention_factor", float)) is not None:
        return attention_factor
    mscale = values.get("mscale", float)
    mscale_all_dim = values.get("mscale_all_dim", float)
    growth = 0.1 * math.log(stretch) if stretch > 1 else 0.0
    if mscale and mscale_all_dim:
        return (mscale * growth + 1) / (mscale_all_dim * growth + 1)
    return growth + 1


def _longrope(rope: RopeParameters, max_len: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): a searched factor per frequency, one set for short contexts and
    one for long."""
    values = rope.values
    original = rope.original_max_positions
    key = "long_factor" if max_len > original else "short_factor"
    factors = torch.tensor(values.require(key, list), dtype=torch.float32)
    radii = _radii(rope.theta, rope.rotary_size)
    if factors.shape != radii.shape:
        raise CheckpointError(
            f"config.json: {key!r} must have {len(radii)} entries, not {len(factors)}."
        )
    attention_factor = values.get("attention_factor", float)
    if attention_factor is None:
        attention_factor = (
            math.sqrt(1 + math.log(rope.stretch) / math.log(original)) if rope.stretch > 1 else 1.0
        )
    return 1.0 / (factors * radii), attention_factor


_SCALINGS: Mapping[str, Callable[[RopeParameters, int], tuple[Tensor, float]]] = MappingProxyType(
    {
        "default": _default,
        "dynamic": _dynamic,
        "linear": _linear,
        "llama3": _llama3,
        "longrope": _longrope,
        "proportional": _proportional,
        "yarn": _yarn,
    }
)
