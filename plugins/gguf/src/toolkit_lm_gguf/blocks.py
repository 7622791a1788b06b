"""Blocks of quantized weights, read into core's record. Each type's blocks are laid out as ggml
has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from toolkit_lm.model import QuantizedWeight
from torch import Tensor

from toolkit_lm_gguf.types import TensorType

_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the codes of IQ4_NL and IQ4_XS."""
_ROWS = 1024
"""Rows of a weight that are unpacked at once."""
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of the codes of MXFP4."""


def decode(of_type: TensorType, raw: Tensor) -> QuantizedWeight:
    """raw [N, blocks of a row, bytes of a block] uint8 -> W [N, K]."""
    decoder = _DECODERS[of_type.name]
    pieces = torch.split(raw, _ROWS)
    first = decoder(pieces[0])
    if len(pieces) == 1:
        return first
    # Unpacking takes several times the memory of the codes: it is for a few rows at once.
    codes = first.codes.new_empty(len(raw), first.codes.shape[1])
    scales = first.scales.new_empty(len(raw), first.scales.shape[1])
    mins = None if first.mins is None else torch.empty_like(scales)
    start = 0
    for piece in pieces:
        part = decoder(piece)
        end = start + len(piece)
        codes[start:end] = part.codes
        scales[start:end] = part.scales
        if mins is not None and part.mins is not None:
            mins[start:end] = part.mins
        start = end
    zeros = None if first.zeros is None else first.zeros[:1, :1].expand_as(scales)
    return replace(first, codes=codes, scales=scales, zeros=zeros, mins=mins)


def concatenated(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight of the outputs of several ones [N_i, K], with codes as wide as the widest and
    groups as small as the smallest."""
    if len(parts) == 1:
        return parts[0]
    tables = {None if part.values is None else tuple(part.values.tolist()) for part in parts}
    if len(tables) > 1:
        parts = [_of_integers(part) for part in parts]
    num_groups = max(part.scales.shape[1] for part in parts)
    bits = max(part.bits for part in parts)
    zeros = None
    if parts[0].values is None and any(
        part.zeros is not None or part.bits != bits for part in parts
    ):
        zeros = torch.cat([_zeros(part, num_groups) for part in parts])
    mins = None
    if any(part.mins is not None for part in parts):
        mins = torch.cat(
            [
                part.scales.new_zeros(len(part.codes), num_groups)
                if part.mins is None
                else _in_groups(part.mins, num_groups)
                for part in parts
            ]
        )
    return QuantizedWeight(
        codes=torch.cat([part.codes for part in parts]),
        bits=bits,
        scales=torch.cat([_in_groups(part.scales, num_groups) for part in parts]),
        zeros=zeros,
        mins=mins,
        values=parts[0].values,
    )


def _of_integers(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight, without a table of values. Those of all types are whole numbers."""
    if weight.values is None:
        return weight
    return replace(
        weight, codes=(weight.values + 128).to(torch.uint8)[weight.codes.int()], bits=8, values=None
    )


def _zeros(weight: QuantizedWeight, num_groups: int) -> Tensor:
    if weight.zeros is not None:
        return _in_groups(weight.zeros, num_groups)
    return weight.scales.new_full((1, 1), 2 ** (weight.bits - 1)).expand(
        len(weight.codes), num_groups
    )


def _in_groups(of_groups: Tensor, num_groups: int) -> Tensor:
    return of_groups.repeat_interleave(num_groups // of_groups.shape[1], dim=1)


def _half(raw: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block, in float32: [N, blocks, 1]."""
    return raw[..., at : at + 2].contiguous().view(torch.float16).float()


def _cut(raw: Tensor, rows: int, bits: int) -> Tensor:
    """Cuts bytes into codes of `bits` bits: of each run of bytes [..., rows * n], the lowest bits
    of all bytes, then the next: [N, blocks, codes of a block]."""
    runs = raw.reshape(*raw.shape[:-1], rows, 1, -1)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=raw.device).view(-1, 1)
    codes: Tensor = (runs >> shifts) & (2**bits - 1)
    return codes.flatten(-3)


def _spread(raw: Tensor) -> Tensor:
    """32 bits of each block -> [N, blocks, 32], the lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return ((raw.unsqueeze(-1) >> shifts) & 1).flatten(-2)


def _weight(
    codes: Tensor,
    bits: int,
    scales: Tensor,
    mins: Tensor | None = None,
    values: Sequence[int] | None = None,
) -> QuantizedWeight:
    """All [N, blocks, of a block]. With `mins` the codes begin at zero."""
    scales = scales.flatten(1)
    return QuantizedWeight(
        codes=codes.flatten(1),
        bits=bits,
        scales=scales,
        zeros=None if mins is None else scales.new_zeros(1, 1).expand_as(scales),
        mins=None if mins is None else mins.flatten(1),
        values=None
        if values is None
        else torch.tensor(values, dtype=torch.float32, device=codes.device),
    )


def _q4_0(raw: Tensor) -> QuantizedWeight:
    return _weight(_cut(raw[..., 2:], 1, 4), 4, _half(raw, 0))


def _q4_1(raw: Tensor) -> QuantizedWeight:
    return _weight(_cut(raw[..., 4:], 1, 4), 4, _half(raw, 0), -_half(raw, 2))


def _q5_0(raw: Tensor) -> QuantizedWeight:
    codes = _cut(raw[..., 6:], 1, 4) | _spread(raw[..., 2:6]) << 4
    return _weight(codes, 5, _half(raw, 0))


def _q5_1(raw: Tensor) -> QuantizedWeight:
    codes = _cut(raw[..., 8:], 1, 4) | _spread(raw[..., 4:8]) << 4
    return _weight(codes, 5, _half(raw, 0), -_half(raw, 2))


def _q8_0(raw: Tensor) -> QuantizedWeight:
    return _weight(raw[..., 2:] ^ 128, 8, _half(raw, 0))


def _q2_k(raw: Tensor) -> QuantizedWeight:
    packed = raw[..., :16]
    return _weight(
        _cut(raw[..., 16:80], 2, 2),
        2,
        _half(raw, 80) * (packed & 15),
        _half(raw, 82) * (packed >> 4),
    )


def _q3_k(raw: Tensor) -> QuantizedWeight:
    packed = raw[..., 96:108]
    factors = _cut(packed[..., :8], 1, 4) | _cut(packed[..., 8:], 1, 2) << 4
    codes = _cut(raw[..., 32:96], 2, 2) | _cut(raw[..., :32], 1, 1) << 2
    return _weight(codes, 3, _half(raw, 108) * (factors.float() - 32))


def _q4_k(raw: Tensor) -> QuantizedWeight:
    return _weight(_cut(raw[..., 16:], 4, 4), 4, *_scales_and_mins(raw))


def _q5_k(raw: Tensor) -> QuantizedWeight:
    codes = _cut(raw[..., 48:], 4, 4) | _cut(raw[..., 16:48], 1, 1) << 4
    return _weight(codes, 5, *_scales_and_mins(raw))


def _scales_and_mins(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and mins of the 8 groups of a block of Q4_K or Q5_K: 6 bits each, in 12 bytes."""
    first, second, both = raw[..., 4:16].reshape(*raw.shape[:-1], 3, 4).unbind(-2)
    scales = torch.cat((first & 63, (both & 15) | ((first >> 2) & 48)), -1)
    mins = torch.cat((second & 63, (both >> 4) | ((second >> 2) & 48)), -1)
    return _half(raw, 0) * scales, _half(raw, 2) * mins


def _q6_k(raw: Tensor) -> QuantizedWeight:
    codes = _cut(raw[..., :128], 2, 4) | _cut(raw[..., 128:192], 2, 2) << 4
    return _weight(codes, 6, _half(raw, 208) * raw[..., 192:208].view(torch.int8))


def _iq4_nl(raw: Tensor) -> QuantizedWeight:
    return _weight(_cut(raw[..., 2:], 1, 4), 4, _half(raw, 0), values=_NONLINEAR)


def _iq4_xs(raw: Tensor) -> QuantizedWeight:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)
    high = ((raw[..., 2:4].unsqueeze(-1) >> shifts) & 3).flatten(-2)
    factors = _cut(raw[..., 4:8], 4, 4) | high << 4
    return _weight(
        _cut(raw[..., 8:], 8, 4), 4, _half(raw, 0) * (factors.float() - 32), values=_NONLINEAR
    )


def _mxfp4(raw: Tensor) -> QuantizedWeight:
    exponents = raw[..., :1].int()
    # Half of 2^(exponent - 127), by the bits of a float32. The two least are subnormal.
    bits = torch.where(exponents < 2, 0x200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return _weight(_cut(raw[..., 1:], 1, 4), 4, bits.view(torch.float32), values=_FP4)


_DECODERS: Mapping[str, Callable[[Tensor], QuantizedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""Decoders by the name of the type."""
