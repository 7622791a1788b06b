"""Schemes: the ways in which formats store a weight. A scheme says which tensors a layer has, and
reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import LinearSpec, QuantizedReader, QuantizedWeight
from torch import Tensor, nn

from toolkit_lm_quantization_formats.codes import E2M1, powers_of_two, unit, unpack
from toolkit_lm_quantization_formats.stored import (
    FP8,
    INPUTS,
    ONE,
    OUTPUTS,
    PARTS,
    Axis,
    ShapeLoader,
    Stored,
    check_groups,
    of_rows,
    passed_over,
    run_groups,
)

_UNUSED = frozenset({"input_scale", "input_global_scale", "input_zero_point", "output_scale"})
"""Tensors about activations. These are not quantized, whatever the checkpoint says."""


class Scheme(ABC):
    """Equal schemes store weights alike: layers that pack several weights need equal ones."""

    @property
    @abstractmethod
    def marks(self) -> tuple[str, ...]:
        """Names of tensors that a layer has only if its weight is quantized."""

    @abstractmethod
    def stored(self, spec: LinearSpec, has: Callable[[str], bool]) -> dict[str, Stored]:
        """The layer's tensors by name. `has` says whether the checkpoint has one. Raises
        CheckpointError and ConfigError."""

    @abstractmethod
    def read(self, spec: LinearSpec, loaded: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight in the tensors `loaded`. Raises CheckpointError."""


class SchemeReader(QuantizedReader):
    """Reads a layer's weight as a scheme says."""

    def __init__(self, kernels: Any, scheme: Scheme) -> None:
        super().__init__(kernels)
        self.scheme = scheme

    def make_parameters(self, spec: LinearSpec) -> dict[str, nn.Parameter]:
        there = frozenset[str]().union(*spec.tensors)
        stored = self.scheme.stored(spec, there.__contains__)
        made = {name: tensor.parameter(spec) for name, tensor in stored.items()}
        if "weight_shape" in there:
            made["weight_shape"] = _checked_only(ShapeLoader(spec))
        return made | {name: _checked_only(passed_over) for name in there & _UNUSED}

    def read(self, spec: LinearSpec, loaded: Mapping[str, Tensor]) -> QuantizedWeight:
        return self.scheme.read(spec, loaded)


def _checked_only(loader: Any) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(1), requires_grad=False)
    param.weight_loader = loader  # type: ignore[attr-defined]
    return param


def _inputs(group: int | None, *, whole: bool = False) -> Axis:
    """Axis of what is stored for each group of inputs; None: for all of them."""
    if group is None:
        return ONE
    return Axis("all inputs" if whole else "inputs", group=group)


@dataclass(frozen=True)
class PackedRows(Scheme):
    """Integers packed along the inputs into int32 [N, K * bits / 32], as compressed-tensors has
    them: scales [N, G], zeros packed along the outputs [N * bits / 32, G]."""

    bits: int
    group: int | None
    """Inputs of a group; None: all."""
    symmetric: bool
    ordered: bool = False
    """Whether the group of each input is stored."""
    per_tensor: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return ("weight_packed", "weight_scale")

    def stored(self, spec: LinearSpec, has: Callable[[str], bool]) -> dict[str, Stored]:
        if self.group is not None:
            check_groups(spec, self.group)
        pack, words = unit(self.bits)
        groups = _inputs(self.group, whole=self.ordered)
        count = groups.length(spec.inputs.full)
        outputs = PARTS if self.per_tensor else OUTPUTS
        made = {
            "weight_packed": Stored((OUTPUTS, Axis("inputs", pack=pack, words=words)), torch.int32),
            "weight_scale": Stored((outputs, groups)),
        }
        if not self.symmetric or has("weight_zero_point"):
            packed = Axis("outputs", pack=pack, words=words)
            made["weight_zero_point"] = Stored((packed, groups), torch.int32)
        if self.ordered:
            made["weight_g_idx"] = Stored((PARTS, INPUTS), torch.int32, most=count - 1)
        return made

    def read(self, spec: LinearSpec, loaded: Mapping[str, Tensor]) -> QuantizedWeight:
        outputs, inputs = spec.shape
        codes = unpack(loaded["weight_packed"], self.bits)[:, :inputs]
        scales = loaded["weight_scale"]
        zeros = None
        if (packed := loaded.get("weight_zero_point")) is not None:
            zeros = unpack(packed.T, self.bits)[:, :outputs].T.float()
        if self.per_tensor:
            scales = of_rows(spec, scales)
        groups = None
        if self.ordered:
            scales, zeros, groups = in_groups(spec, scales, zeros, loaded["weight_g_idx"])
        return QuantizedWeight(
            codes=codes, bits=self.bits, scales=scales, zeros=zeros, groups=groups
        )


def in_groups(
    spec: LinearSpec, scales: Tensor, zeros: Tensor | None, stated: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scales, zeros and groups of a weight whose parts state the group of each input: `stated` [P,
    K]. Groups are None where they are runs of equal length."""
    found, groups = torch.unique(stated.long(), dim=1, return_inverse=True)
    sizes = [part.size for part in spec.outputs]

    def chosen(of_groups: Tensor) -> Tensor:
        pieces = torch.split(of_groups, sizes)
        return torch.cat([piece[:, found[i]] for i, piece in enumerate(pieces)])

    count = found.shape[1]
    length = len(groups) // count
    runs = torch.arange(len(groups), device=groups.device) // length
    in_runs = len(groups) % count == 0 and torch.equal(groups, runs)
    return (
        chosen(scales),
        None if zeros is None else chosen(zeros),
        None if in_runs else groups,
    )


@dataclass(frozen=True)
class PackedColumns(Scheme):
    """Integers packed along the inputs into int32 [K * bits / 32, N], as GPTQ has them: scales [G,
    N], zeros packed along the outputs [G, N * bits / 32], the group of each input [K]."""

    bits: int
    group: int | None
    ordered: bool
    """Whether the inputs of a group lie apart."""
    zero_offset: int
    """Added to each stored zero."""

    @property
    def marks(self) -> tuple[str, ...]:
        return ("qweight", "qzeros", "scales")

    def stored(self, spec: LinearSpec, has: Callable[[str], bool]) -> dict[str, Stored]:
        if self.group is not None:
            check_groups(spec, self.group)
        pack, words = unit(self.bits)
        groups = _inputs(self.group, whole=self.ordered)
        made = {
            "qweight": Stored((Axis("inputs", pack=pack, words=words), OUTPUTS), torch.int32),
            "qzeros": Stored((groups, Axis("outputs", pack=pack, words=words)), torch.int32),
            "scales": Stored((groups, OUTPUTS)),
        }
        if self.ordered or has("g_idx"):
            count = groups.length(spec.inputs.full)
            made["g_idx"] = Stored((PARTS, INPUTS), torch.int32, most=count - 1)
        return made

    def read(self, spec: LinearSpec, loaded: Mapping[str, Tensor]) -> QuantizedWeight:
        outputs, inputs = spec.shape
        codes = unpack(loaded["qweight"].T, self.bits)[:, :inputs]
        scales = loaded["scales"].T.contiguous()
        zeros = unpack(loaded["qzeros"], self.bits)[:, :outputs].T.float() + self.zero_offset
        groups = None
        if (stated := loaded.get("g_idx")) is not None:
            is_whole = self.ordered or spec.inputs.size == spec.inputs.full
            if is_whole:
                scales, zeros, groups = in_groups(  # type: ignore[assignment]
                    spec, scales, zeros, stated
                )
            elif not self._in_runs(spec, stated):
                raise CheckpointError(
                    f"{', '.join(spec.sources)}: g_idx is not in order, and config.json says "
                    "desc_act false"
                )
        return QuantizedWeight(
            codes=codes, bits=self.bits, scales=scales, zeros=zeros, groups=groups
        )

    def _in_runs(self, spec: LinearSpec, stated: Tensor) -> bool:
        places = torch.arange(spec.inputs.start, spec.inputs.start + spec.inputs.size)
        runs = places // (self.group or spec.inputs.full)
        return bool((stated.cpu() == runs).all())


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of an int32, counted from the lowest, hold each of eight outputs."""


@dataclass(frozen=True)
class AwqColumns(Scheme):
    """Integers of 4 bits packed along the outputs into int32 [K, N / 8], and zeros [G, N / 8], as
    AWQ has them: scales [G, N]."""

    group: int | None
    symmetric: bool = False
    """Whether zeros that are not stored are 8. Stored ones count, as AutoRound has them."""

    @property
    def marks(self) -> tuple[str, ...]:
        return ("qweight", "scales") if self.symmetric else ("qweight", "qzeros", "scales")

    def stored(self, spec: LinearSpec, has: Callable[[str], bool]) -> dict[str, Stored]:
        if self.group is not None:
            check_groups(spec, self.group)
        packed = Axis("outputs", pack=8)
        groups = _inputs(self.group)
        made = {
            "qweight": Stored((INPUTS, packed), torch.int32),
            "scales": Stored((groups, OUTPUTS)),
        }
        if not self.symmetric or has("qzeros"):
            made["qzeros"] = Stored((groups, packed), torch.int32)
        return made

    def read(self, spec: LinearSpec, loaded: Mapping[str, Tensor]) -> QuantizedWeight:
        outputs = spec.shape[0]
        unpacked = {
            name: _in_order(unpack(loaded[name], 4))[:, :outputs].T
            for name in ("qweight", "qzeros")
            if name in loaded
        }
        return QuantizedWeight(
            codes=unpacked["qweight"].contiguous(),
            bits=4,
            scales=loaded["scales"].T.contiguous(),
            zeros=unpacked["qzeros"].float() if "qzeros" in unpacked else None,
        )


def _in_order(codes: Tensor) -> Tensor:
    """Outputs as they follow each other: codes [R, N], as they lie in int32."""
    return codes.view(len(codes), -1, 8)[..., _AWQ_ORDER].flatten(1)


@dataclass(frozen=True)
class Plain(Scheme):
    """A weight [N, K] whose elements are codes of 8 bits: integers, or float8. Scales per part, per
    output, per group of inputs, or per block of both."""

    dtype: torch.dtype = FP8
    codes: str = "weight"
    """Name of the codes."""
    scale: str = "weight_scale"
    """Name of the scales."""
    zero: str = "weight_zero_point"
    """Name of the zeros."""
    bits: int = 8
    rows: int | None = None
    """Outputs of a block. 1: each has a scale; None: one is for a whole weight."""
    group: int | None = None
    """Inputs of a group; None: all."""
    symmetric: bool = True
    exponents: bool = False
    """Whether scales are exponents of two, in uint8."""
    factor: float = 1.0
    """Factor of all scales."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.scale,) if self.codes == "weight" else (self.codes, self.scale)

    @property
    def _codes(self) -> Stored:
        if self.dtype is FP8 or self.bits == 8:
            return Stored((OUTPUTS, INPUTS), self.dtype)
        half = 2 ** (self.bits - 1)
        return Stored((OUTPUTS, INPUTS), self.dtype, most=half - 1, least=-half)

    def stored(self, spec: LinearSpec, has: Callable[[str], bool]) -> dict[str, Stored]:
        if self.group is not None and self.rows == 1:
            check_groups(spec, self.group)
        outputs = PARTS if self.rows is None else Axis("outputs", group=self.rows)
        axes = (outputs, _inputs(self.group))
        made = {
            self.codes: self._codes,
            self.scale: Stored(axes, torch.uint8, most=254) if self.exponents else Stored(axes),
        }
        if not self.symmetric or has(self.zero):
            made[self.zero] = Stored(axes, torch.int8)
        return made

    def read(self, spec: LinearSpec, loaded: Mapping[str, Tensor]) -> QuantizedWeight:
        codes = loaded[self.codes]
        offset = 2 ** (self.bits - 1)
        if self.dtype is torch.int8:
            codes = (codes.short() + offset).to(torch.uint8)
        scales = self._of_outputs(spec, loaded[self.scale])
        scales = powers_of_two(scales) if self.exponents else scales * self.factor
        zeros = None
        if (stated := loaded.get(self.zero)) is not None:
            # Symmetric codes may be stored with zeros, which are all 0.
            zeros = self._of_outputs(spec, stated).float() + offset if stated.any() else None
        groups = None if self.group is None else run_groups(spec, self.group)
        return QuantizedWeight(
            codes=codes, bits=self.bits, scales=scales, zeros=zeros, groups=groups
        )

    def _of_outputs(self, spec: LinearSpec, stored: Tensor) -> Tensor:
        return stored if self.rows == 1 else of_rows(spec, stored, self.rows)


@dataclass(frozen=True)
class Nibbles(Scheme):
    """Codes of 4 bits with a value each, two in a byte [N, K / 2], the first in the low bits:
    NVFP4, MXFP4, NF4 and FP4."""

    group: int
    codes: str = "weight_packed"
    """Name of the codes."""
    scale: str = "weight_scale"
    """Name of the scales."""
    scale_dtype: torch.dtype = FP8
    """uint8: exponents of two."""
    whole_scale: str | None = None
    """Name of the scale of the whole weight."""
    divides: bool = False
    """Whether it divides the other scales. Otherwise it multiplies them."""
    values: tuple[float, ...] = E2M1
    """The value of each code."""
    marks: tuple[str, ...] = ("weight_packed", "weight_scale")

    def stored(self, spec: LinearSpec, has: Callable[[str], bool]) -> dict[str, Stored]:
        check_groups(spec, self.group)
        axes = (OUTPUTS, _inputs(self.group))
        most = 254 if self.scale_dtype is torch.uint8 else None
        made = {
            self.codes: Stored((OUTPUTS, Axis("inputs", pack=2)), torch.uint8),
            self.scale: Stored(axes, self.scale_dtype, most),
        }
        if self.whole_scale is not None:
            made[self.whole_scale] = Stored((PARTS,), positive=True)
        return made

    def read(self, spec: LinearSpec, loaded: Mapping[str, Tensor]) -> QuantizedWeight:
        scales = loaded[self.scale]
        scales = powers_of_two(scales) if scales.dtype is torch.uint8 else scales.float()
        if self.whole_scale is not None:
            whole = loaded[self.whole_scale]
            whole = of_rows(spec, whole)[:, None]
            scales = scales / whole if self.divides else scales * whole
        return QuantizedWeight(
            codes=unpack(loaded[self.codes], 4),
            bits=4,
            scales=scales,
            values=torch.tensor(self.values, device=scales.device),
        )
