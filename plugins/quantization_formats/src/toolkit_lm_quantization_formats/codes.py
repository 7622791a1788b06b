"""Codes of quantized weights: how they lie in bytes, and the values of those of floats."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = (*_E2M1, *(-value for value in _E2M1))
"""Values of 4-bit floats with two bits of exponent, by code. The sign is the highest bit."""
_FP4 = [0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12]
FP4 = (*_FP4, *(-value for value in _FP4))
"""Values of the 4-bit floats of bitsandbytes."""
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Values of NormalFloat with 4 bits (Dettmers et al. 2023)."""


def unit(bits: int, word: int = 32) -> tuple[int, int]:
    """The least number of codes that fill whole words of `word` bits, and the number of words."""
    common = math.gcd(bits, word)
    return word // common, bits // common


def unpack(stored: Tensor, bits: int) -> Tensor:
    """Codes [..., M * 8 / bits] uint8 of bytes or words [..., M] in which they follow each other,
    the first in the lowest bits. The last word may hold a part of a code, which is then one too."""
    data = stored.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    count, size = unit(bits, 8)
    if data.shape[-1] % size:
        data = F.pad(data, (0, -data.shape[-1] % size))
    data = data.view(*data.shape[:-1], -1, size)
    codes = []
    for code in range(count):
        first, shift = divmod(code * bits, 8)
        value = data[..., first] >> shift
        if shift + bits > 8:
            value = value | data[..., first + 1] << (8 - shift)
        codes.append(value & (1 << bits) - 1)
    return torch.stack(codes, -1).flatten(-2)


def powers_of_two(exponents: Tensor) -> Tensor:
    """2^(e - 127) as float32, for exponents e in uint8 or float8_e8m0fnu."""
    powers = exponents.view(torch.uint8).to(torch.float64) - 127
    return torch.exp2(powers).float()
