"""QuantizedPanels: a linear method with its quantized weight in the kernels' layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from toolkit_lm.model import (
    NO_EPILOGUE,
    Epilogue,
    LinearMethod,
    LinearSpec,
    QuantizedWeight,
    Rows,
)
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm_cpu.added import Added
from toolkit_lm_cpu.arena import Arena
from toolkit_lm_cpu.arguments import Quantized
from toolkit_lm_cpu.levels import PART, levels_of, may_have_levels, offsets_of
from toolkit_lm_cpu.library import _kernels, code_isa, code_kernel, usable_types
from toolkit_lm_cpu.panels import ACTIVATIONS, LANES, added_to, number_of
from toolkit_lm_cpu.rounding import FLOAT8, fine_group, round_again, rounding

_WHOLE = 64
"""Codes of a row are filled up to a multiple of this number, if all are one group."""
_GROUPS = (512, 256, 128, 64, 32, LANES)
"""Inputs whose codes share a scale, if weights have one per output: the first that divides all, of
those of at most half of them or 128."""
_FINE = 128
_GROUPS_OF_LEVELS = (*range(512, 0, -_WHOLE), 32)
"""The same, if groups of weights have levels: the first that is a multiple of their group, too."""
_MOST_INPUTS = 2**16
"""Inputs of a group, at most: sums of products are in 32 bits."""


class QuantizedPanels(LinearMethod):
    """A linear method with its weight in panels of 16 outputs, in codes of 4 or 8 bits.

    A row of x is rounded to codes of 8 bits, in each group of inputs by a scale of its own. Their
    sums are exact. A result is therefore independent of the rest of the batch, and of the
    processor's instructions.
    """

    added: Added | None = None
    """Adapters of the step's rows."""

    def __init__(self, weight: QuantizedWeight, spec: LinearSpec, arena: Arena) -> None:
        """Packs a weight, for which `refusal` must be None."""
        self.outputs, self.inputs = spec.shape
        self.dtype = spec.dtype
        self.type = usable_types()[spec.dtype]
        self.rounded = rounding(weight)
        """Why weights are rounded to codes of 8 bits. None: they are held as they are."""
        if self.rounded is not None:
            weight = round_again(weight)
        self.bits = 4 if weight.bits <= 4 else 8
        self.is_halved = is_halved(spec)
        """Whether panels hold the two halves of the outputs apart, as gated products need them."""
        num_scales = weight.scales.shape[1]
        levels = levels_of(weight)
        self.part = self.inputs // num_scales
        """Inputs whose weights share a scale."""
        sizes = tuple(size for size in _GROUPS if size <= max(self.inputs // 2, _FINE))
        if levels is not None:
            sizes = tuple(size for size in _GROUPS_OF_LEVELS if size % self.part == 0)
        self.group = (
            self.part
            if num_scales > 1 and levels is None
            else next((size for size in sizes if self.inputs % size == 0), self.part)
        )
        """Inputs whose codes share a scale: those of a weight's group, if its scales differ."""
        self.groups = self.inputs // self.group
        if self.groups == 1:
            self.group = -(-self.inputs // _WHOLE) * _WHOLE
        self.order = _order(weight)
        offsets = offsets_of(weight)
        scales = weight.scales
        self.values: Tensor | None = None
        """[16] uint8: the values of codes, plus 128. [16] int16: levels of codes, with ratios."""
        self.ratios: Tensor | None = None
        """[panels, G, 4, 4]: of output 4 o + q of a panel at [q, o]. None: there are no levels."""
        if levels is not None:
            scales, ratios, self.values, offsets = levels
            self.ratios = self._pack_ratios(ratios)
        elif weight.values is not None:
            unit = _unit(weight.values)
            scales = scales * unit
            values = (weight.values / unit).round().add(128).to(torch.uint8)
            self.values = F.pad(values, (0, 16 - len(values)))
        self.packed = self._pack(weight, arena)
        self.scales = self._pack_scales(in_16_bits(scales))
        """[panels, G, 16]: in float16 if that is exact, as scales of most checkpoints are."""
        pack_offsets = self._pack_scales if levels is None else self._pack_ratios
        self.offsets = None if offsets is None else pack_offsets(offsets)
        """[panels, G, 16]; zeros of levels, int16, as ratios."""

    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        raise AssertionError("it is made once the weight is loaded")

    @property
    def quantized(self) -> Quantized:
        """How the kernels read the weight. The method must outlive it."""
        return describe(
            self.packed,
            self.scales,
            self.offsets,
            self.values,
            self.ratios,
            self.order,
            self.group,
            self.bits,
        )

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not self.is_halved:
            return self._product(x, bias)
        # The kernels see outputs one after the other, with the last panel of each half filled up.
        half = self.outputs // 2
        filled = -(-half // LANES) * LANES
        wide = self._product(x, None, outputs=2 * filled)
        out = torch.cat([wide[:, :half], wide[:, filled : filled + half]], dim=1)
        return out if bias is None else out.add_(bias)

    def dequantized(self) -> Tensor:
        return self.embed(torch.arange(self.outputs))

    def likeliest(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
        if self.is_halved:
            return None
        if x.stride(1) != 1:
            x = x.contiguous()
        quantized = self.quantized
        best = x.new_empty(len(x))
        indices = torch.empty(len(x), dtype=torch.int64)
        codes = memory(quantized, len(x))
        _kernels.likeliest_quantized(
            self.type,
            best.data_ptr(),
            indices.data_ptr(),
            weights=self.packed.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            outputs=self.outputs,
            inputs=self.inputs,
            activation=ACTIVATIONS[None],
            is_gated=False,
            x=x.data_ptr(),
            x_stride=x.stride(0),
            residual=0,
            residual_stride=0,
            # Results are not kept.
            out=0,
            out_stride=0,
            rows=len(x),
            quantized=quantized,
            codes=0 if quantized.float8 else codes.data_ptr(),
        )
        return best, indices

    def apply(
        self,
        x: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue = NO_EPILOGUE,
        *,
        rows: Rows | Tensor = Rows.FLAT,
    ) -> Tensor:
        activation, gated, residual = epilogue
        half = self.outputs // 2
        fits = self.is_halved or half % LANES == 0 if gated else not self.is_halved
        added = added_to(self.added, x, rows)
        number = number_of(activation, gated)
        if number is None or not fits:
            if added is None:
                return super().apply(x, bias, epilogue)
            return epilogue.finish(self._product(x, bias, added=added))
        return self._product(x, bias, number, gated, residual, added=added)

    def embed(self, ids: Tensor) -> Tensor:
        if self.is_halved:
            half = self.outputs // 2
            ids = torch.where(ids < half, ids, ids - half + -(-half // LANES) * LANES)
        panels = ids // LANES
        lanes = ids % LANES
        values = self._rows(panels, lanes).view(len(ids), self.groups, self.group)
        values *= self.scales[panels, :, lanes].unsqueeze(2)
        if self.offsets is not None and self.ratios is None:
            values -= self.offsets[panels, :, lanes].unsqueeze(2)
        rows = values.view(len(ids), -1)[:, : self.inputs]
        if self.order is not None:
            rows = torch.empty_like(rows).index_copy_(1, self.order.long(), rows)
        return rows.to(self.dtype)

    def _rows(self, panels: Tensor, lanes: Tensor) -> Tensor:
        """The codes of some outputs, less their zeros, or their values: float32."""
        if self.ratios is not None:
            return self._levels(panels, lanes)
        words = self.packed.view(-1, self.groups * self.group * self.bits // 32, LANES, 4)
        codes = words[panels, :, lanes]
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=2)
        if self.values is not None:
            codes = self.values[codes.int()]
        return (
            codes.flatten(1).float().sub_(128 if self.values is not None else 2 ** (self.bits - 1))
        )

    def _levels(self, panels: Tensor, lanes: Tensor) -> Tensor:
        """The codes of some outputs in 8 bits: float32."""
        assert self.values is not None and self.ratios is not None
        packed = self.packed.view(-1, self.groups * self.group // PART, 4, 4, PART // 2)
        codes = packed[panels, :, lanes % 4, lanes // 4]
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
        levels = self.values.int()[codes.int()].view(len(panels), -1, self.part)
        if self.offsets is not None:
            levels = levels - self.offsets[panels, :, lanes % 4, lanes // 4].unsqueeze(2)
        ratios = self.ratios[panels, :, lanes % 4, lanes // 4].int().unsqueeze(2)
        return (levels * ratios + 2**14 >> 15).flatten(1).float()

    def _product(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: int = ACTIVATIONS[None],
        gated: bool = False,
        residual: Tensor | None = None,
        *,
        outputs: int | None = None,
        added: Added | None = None,
    ) -> Tensor:
        product = linear
        if added is not None:
            product = partial(linear, added=added)
        elif torch.compiler.is_compiling():
            product = torch.ops.toolkit_lm_cpu.quantized_linear
        return product(
            self.type,
            x,
            self.packed,
            self.scales,
            self.offsets,
            self.values,
            self.ratios,
            self.order,
            self.group,
            self.inputs,
            outputs or (self.outputs // 2 if gated else self.outputs),
            self.bits,
            bias,
            activation,
            gated,
            residual,
        )

    def _pack(self, weight: QuantizedWeight, arena: Arena) -> Tensor:
        codes = weight.codes.contiguous()
        halves = 2 if self.is_halved else 1
        outputs = self.outputs // halves
        width = self.groups * self.group
        size = -(-outputs // LANES) * LANES * width * self.bits // 8
        packed = arena.empty(halves * size, torch.uint8)
        for half in range(halves):
            _kernels.pack_codes(
                codes=codes.data_ptr() + half * outputs * self.inputs,
                order=0 if self.order is None else self.order.data_ptr(),
                to=packed.data_ptr() + half * size,
                outputs=outputs,
                inputs=self.inputs,
                width=width,
                bits=self.bits,
                added=0
                if weight.values is not None
                else 2 ** (self.bits - 1) - 2 ** (weight.bits - 1),
                has_levels=self.ratios is not None,
            )
        return packed

    def _pack_scales(self, scales: Tensor) -> Tensor:
        """[N, G] -> [panels, G, 16]"""
        parts = scales.chunk(2) if self.is_halved else (scales,)
        filled = [F.pad(part, (0, 0, 0, -len(part) % LANES)) for part in parts]
        return torch.cat(filled).view(-1, LANES, scales.shape[1]).transpose(1, 2).contiguous()

    def _pack_ratios(self, ratios: Tensor) -> Tensor:
        """[N, G] -> [panels, G, 4, 4]"""
        panels = self._pack_scales(ratios)
        return panels.view(-1, ratios.shape[1], 4, 4).transpose(2, 3).contiguous()


def describe(
    packed: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    values: Tensor | None,
    ratios: Tensor | None,
    order: Tensor | None,
    group: int,
    bits: int,
) -> Quantized:
    """How the kernels read a weight in panels. The tensors must outlive it."""
    inputs = packed.numel() * 8 // bits // (len(scales) * LANES)
    at_values = 0 if values is None else values.data_ptr()
    at_offsets = 0 if offsets is None else offsets.data_ptr()
    return Quantized(
        scales=scales.data_ptr(),
        offsets=at_offsets if ratios is None else 0,
        values=at_values if ratios is None else 0,
        ratios=0 if ratios is None else ratios.data_ptr(),
        levels=0 if ratios is None else at_values,
        zeros=0 if ratios is None else at_offsets,
        order=0 if order is None else order.data_ptr(),
        scaled=scales.shape[1],
        groups=inputs // group,
        group=group,
        part=group if ratios is None else inputs // ratios.shape[1],
        bits=bits,
        is_half=scales.dtype is torch.float16,
        kernel=code_kernel(),
        float8=FLOAT8.get(packed.dtype, 0),
    )


def size_of_codes(quantized: Quantized) -> int:
    """Bytes for the codes of a row of x, with a scale and a sum of each group. 0: it has none."""
    return 0 if quantized.float8 else quantized.groups * (quantized.group + 8)


def memory(quantized: Quantized, rows: int) -> Tensor:
    """Memory for the codes of rows of x. There is some for no rows too."""
    return torch.empty(rows * size_of_codes(quantized) + 1, dtype=torch.uint8)


def linear(
    type: int,
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    values: Tensor | None,
    ratios: Tensor | None,
    order: Tensor | None,
    group: int,
    inputs: int,
    outputs: int,
    bits: int,
    bias: Tensor | None,
    activation: int,
    gated: bool,
    residual: Tensor | None,
    added: Added | None = None,
) -> Tensor:
    """Computes activation(x W^T + bias) + residual, or the gated form, with W in panels of codes.

    `outputs` are those of the result.
    """
    if x.stride(1) != 1 or (added is not None and x.stride(0) % 2):
        x = x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    quantized = describe(packed, scales, offsets, values, ratios, order, group, bits)
    rows = len(x)
    out = x.new_empty(rows, outputs)
    codes = memory(quantized, rows)
    _kernels.quantized_linear(
        type,
        None if added is None else added.step.groups,
        None if added is None else added.low_ranks,
        weights=packed.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        outputs=outputs,
        inputs=inputs,
        activation=activation,
        is_gated=gated,
        x=x.data_ptr(),
        x_stride=x.stride(0),
        residual=0 if residual is None else residual.data_ptr(),
        residual_stride=0 if residual is None else residual.stride(0),
        out=out.data_ptr(),
        out_stride=outputs,
        rows=rows,
        quantized=quantized,
        codes=0 if quantized.float8 else codes.data_ptr(),
    )
    return out


def refusal(weight: QuantizedWeight, spec: LinearSpec) -> str | None:
    """Why the kernels cannot multiply by a weight. None: they can."""
    if spec.dtype not in usable_types():
        return f"its kernels do not compute in {spec.dtype}"
    sums_codes = rounding(weight) is not None or not weight.codes.is_floating_point()
    if sums_codes and weight.scales.shape[1] == 1 and spec.shape[1] > _MOST_INPUTS:
        return f"a group has more than {_MOST_INPUTS} inputs"
    return None


def explain(weight: QuantizedWeight) -> str:
    """The kernel that multiplies by a weight without a `refusal`, and why none is faster."""
    rounded = rounding(weight)
    if rounded is None and weight.codes.is_floating_point():
        name = str(weight.codes.dtype).removeprefix("torch.")
        return f"{name} as stored, decoded as it is multiplied: no instructions multiply it"
    groups = weight.scales.shape[1]
    size = weight.codes.shape[1] // groups
    bits = 4 if weight.bits <= 4 and rounded is None else 8
    start = f"codes of {bits} bits by {code_isa(code_kernel())}"
    if rounded is not None:
        group = fine_group(weight)
        return f"{start}, rounded to 8 bits with a scale for {group} inputs, since {rounded}"
    reasons = [start]
    if weight.bits not in (4, 8):
        reasons.append(f"which hold those of {weight.bits}, since there are panels of 4 and 8")
    if may_have_levels(weight):
        reasons.append(
            "found in codes of 8 bits with one scale per output, unless scales differ much"
        )
    elif groups > 1 and size < _FINE:
        reasons.append(f"a scale to multiply by for {size} inputs")
    if weight.zeros is not None or weight.mins is not None:
        reasons.append("an offset for each group, unless all are 0")
    if weight.values is not None:
        reasons.append("a table to look codes up in")
    if weight.groups is not None:
        reasons.append("inputs to bring into the order of their groups")
    return ", ".join(reasons)


def is_halved(spec: LinearSpec) -> bool:
    """Whether a layer has two halves that would share a panel."""
    sizes = {part.size for part in spec.outputs}
    return len(spec.outputs) == 2 and len(sizes) == 1 and sizes.pop() % LANES != 0


def in_16_bits(scales: Tensor) -> Tensor:
    """Scales in float16, if that is exact."""
    halved = scales.half()
    return halved if torch.equal(halved.float(), scales) else scales


def _unit(values: Tensor) -> float:
    """The unit of the codes that values of weights have in the kernels: a power of 2 by which all
    are whole numbers, if they are then in 8 bits; otherwise the finest for 8 bits."""
    most = values.abs().max().item() or 1.0
    for exponent in range(8):
        unit = 2.0**-exponent
        if most / unit <= 127 and torch.equal((values / unit).round(), values / unit):
            return unit
    return most / 127


def _order(weight: QuantizedWeight) -> Tensor | None:
    """The inputs by group, [K] int32. None: they are in order."""
    if weight.groups is None:
        return None
    order = weight.groups.argsort(stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order.int()


# To a compiler a product is one opaque op.
_library: Any = torch.library.Library("toolkit_lm_cpu", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "quantized_linear(int type, Tensor x, Tensor packed, Tensor scales, Tensor? offsets, Tensor? "
    "values, Tensor? ratios, Tensor? order, int group, int inputs, int outputs, int bits, Tensor? "
    "bias, int activation, bool gated, Tensor? residual) -> Tensor"
)
_library.impl("quantized_linear", linear, "CompositeExplicitAutograd")
torch.library.register_fake(
    "toolkit_lm_cpu::quantized_linear",
    lambda type, x, packed, scales, offsets, values, ratios, order, group, inputs, outputs, *rest: (
        x.new_empty(x.shape[0], outputs)
    ),
    lib=_library,
)
