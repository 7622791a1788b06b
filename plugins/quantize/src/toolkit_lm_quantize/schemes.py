"""Schemes: from a weight of floats to codes and scales, row by row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import QuantizedWeight
from torch import Tensor

_LEAST = torch.finfo(torch.float32).tiny
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
GROUP_SIZES = (32, 64, 128)


class Scheme(ABC):
    """How a weight is quantized. Each row [K] has scales of its own, and is quantized without the
    others."""

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype]
    """Dtype of what is stored."""
    pack: ClassVar[int] = 1
    """Inputs whose codes a stored element holds."""
    group: int | None = None
    """Inputs that have one scale. None: all of a row."""

    @abstractmethod
    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """[N, K] float32 -> codes [N, K], scales [N, G] float32. A code of 0 stands for 0."""

    @abstractmethod
    def encode(self, weight: Tensor, scales: Tensor) -> Tensor:
        """The nearest codes [N, K] of [N, K] float32, for these scales [N, G]."""

    @abstractmethod
    def pack_codes(self, codes: Tensor) -> Tensor:
        """Codes [N, K] -> what is stored, [N, K / pack]."""

    @abstractmethod
    def weight(self, stored: Tensor, scales: Tensor) -> QuantizedWeight:
        """The weight of what is stored."""

    def rounded(self, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[N, K] -> codes [N, K], scales [N, G] in `dtype`. The codes are the nearest for these.

        Raises CheckpointError for values that are not finite, or too large for such scales.
        """
        exact = weight.float()
        scales = self.quantize(exact)[1]
        if self.group is None:
            scales = scales.clamp_min(torch.finfo(dtype).tiny)
        rounded = scales.to(dtype)
        if not torch.isfinite(scales).all():
            raise CheckpointError("holds values that are not finite")
        if not torch.isfinite(rounded).all():
            raise CheckpointError(f"holds values that are too large for scales in {_name(dtype)}")
        return self.encode(exact, rounded.float()), rounded

    def round_trip(self, weight: Tensor) -> Tensor:
        """[N, K] -> what the quantized weight stands for, float32."""
        codes, scales = self.quantize(weight.float())
        return self.weight(self.pack_codes(codes), scales).dequantized()

    def __str__(self) -> str:
        return self.name if self.group is None else f"{self.name} in groups of {self.group}"


@dataclass(frozen=True)
class Int8Scheme(Scheme):
    """Codes -127 to 127, one scale per output: the greatest value of a row is 127 or -127."""

    name = "int8"
    dtype = torch.int8

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        scales = weight.abs().amax(-1, keepdim=True).div_(127).clamp_min_(_LEAST)
        return self.encode(weight, scales), scales

    def encode(self, weight: Tensor, scales: Tensor) -> Tensor:
        return (weight / scales).round_().clamp_(-127, 127)

    def pack_codes(self, codes: Tensor) -> Tensor:
        return codes.to(torch.int8)

    def weight(self, stored: Tensor, scales: Tensor) -> QuantizedWeight:
        return QuantizedWeight(codes=stored.view(torch.uint8) ^ 128, bits=8, scales=scales)


@dataclass(frozen=True)
class Fp8Scheme(Scheme):
    """Codes in float8 e4m3, one scale per output: the greatest value of a row is 448 or -448."""

    name = "fp8"
    dtype = torch.float8_e4m3fn

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        scales = weight.abs().amax(-1, keepdim=True).div_(_FP8_MAX).clamp_min_(_LEAST)
        return self.encode(weight, scales), scales

    def encode(self, weight: Tensor, scales: Tensor) -> Tensor:
        # Beyond the greatest value there is none but NaN.
        return (weight / scales).clamp_(-_FP8_MAX, _FP8_MAX)

    def pack_codes(self, codes: Tensor) -> Tensor:
        return codes.to(self.dtype)

    def weight(self, stored: Tensor, scales: Tensor) -> QuantizedWeight:
        return QuantizedWeight(codes=stored, bits=8, scales=scales)


@dataclass(frozen=True)
class Int4Scheme(Scheme):
    """Codes -8 to 7, one scale per group of inputs. Two codes are stored in a byte, the first in
    its low bits.

    The value of greatest magnitude becomes -8, -7 or -9 (clamped), whichever gives the least
    squared error with the scale that suits its codes best: 8% less than -8 for all (Q4_0), 30% less
    than +-7. Scales are rounded to float16, so that kernels may hold them in 16 bits.
    """

    group: int = 32
    name = "int4"
    dtype = torch.uint8
    pack = 2

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        groups = weight.view(len(weight), -1, self.group)
        greatest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        codes, scales, best = _fitted(groups, greatest / -8)
        for level in (-7, -9):
            found, fitting, gain = _fitted(groups, greatest / level)
            is_better = gain > best
            best = torch.where(is_better, gain, best)
            codes = torch.where(is_better, found, codes)
            scales = torch.where(is_better, fitting, scales)
        return codes.flatten(1), _in_half(scales.squeeze(-1))

    def encode(self, weight: Tensor, scales: Tensor) -> Tensor:
        groups = weight.view(len(weight), -1, self.group)
        return _nearest(groups, scales.unsqueeze(-1)).flatten(1)

    def pack_codes(self, codes: Tensor) -> Tensor:
        nibbles = codes.to(torch.int8).view(torch.uint8) & 15
        return nibbles[:, ::2] | nibbles[:, 1::2] << 4

    def weight(self, stored: Tensor, scales: Tensor) -> QuantizedWeight:
        # 8 more than the code: 0 to 15.
        codes = torch.stack([stored & 15, stored >> 4], -1).flatten(1).bitwise_xor_(8)
        return QuantizedWeight(codes=codes, bits=4, scales=scales)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _nearest(groups: Tensor, step: Tensor) -> Tensor:
    return groups.div(torch.where(step == 0, 1, step)).round_().clamp_(-8, 7)


def _fitted(groups: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of groups [N, G, group] in steps [N, G, 1], the scale that suits these codes best, and
    what that takes off the squared error."""
    codes = _nearest(groups, step)
    dots = (codes * groups).sum(-1, keepdim=True)
    squares = codes.square().sum(-1, keepdim=True).clamp_min_(1)
    scales = dots / squares
    return codes, scales, dots * scales


def _in_half(scales: Tensor) -> Tensor:
    """Scales rounded to float16. Those stay that would lose more than they would by bfloat16: very
    small and very large ones."""
    halves = scales.half().float()
    return torch.where((halves - scales).abs() <= scales.abs() * 2**-9, halves, scales)


SCHEMES: dict[str, type[Scheme]] = {
    scheme.name: scheme for scheme in (Int8Scheme, Int4Scheme, Fp8Scheme)
}
"""All schemes by name, which is that of the quantization."""
