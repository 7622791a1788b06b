"""QuantizedProduct and ScaledProduct: linear methods with quantized weights on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from toolkit_lm.model import LinearSpec, QuantizedWeight
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm_triton.device import LAUNCH, multiplies_float8
from toolkit_lm_triton.gated import GatedMethod, Gates
from toolkit_lm_triton.pieces import power_of_2

_TILES = 64, 32, 16
"""Inputs that a program multiplies at a time: the first that divides a weight's groups."""
_CODED_TILE = 128
"""Inputs of x that share a scale, where x is rounded to codes of 8 bits."""
_FEW_ROWS = 16
"""Rows of the smallest matrix that tensor cores multiply. So few wait for the weight's bytes."""
_PROGRAMS = 2048
"""Programs that keep a GPU busy: as many for each of its processors as it holds."""
_MANY_ROWS = 128
"""With more rows a weight is dequantized first: PyTorch's product makes up for that."""
_DEQUANTIZED = 2**26
"""Most numbers of a weight that are dequantized at a time: they bound what memory it takes."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes of MXFP4 from 0 on. From 8 on they are negative."""
_ALIGNMENT = 16
"""Inputs and outputs of `torch._scaled_mm` are multiples of it."""
_FLOAT8 = 448.0
"""Greatest number of float8_e4m3fn."""


class QuantizedMethod(GatedMethod):
    """Base of methods that the kernels make once a weight is loaded."""

    codes: Tensor
    """[outputs, ...]"""

    def __init__(self, kernels: Gates, dtype: torch.dtype) -> None:
        super().__init__(kernels)
        self.dtype = dtype

    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        raise AssertionError("it is made once the weight is loaded")

    @property
    def stored(self) -> Tensor:
        return self.codes


class QuantizedProduct(QuantizedMethod):
    """A weight in codes of 4 or 8 bits, by which a kernel in Triton multiplies.

    A weight with one scale of 8-bit codes per output, and nothing else, is multiplied as integers:
    each row of x is rounded to 8 bits, by a scale for 128 inputs. Codes of other weights become
    numbers in the dtype of x, a tile at a time.
    """

    def __init__(self, weight: QuantizedWeight, spec: LinearSpec, kernels: Gates) -> None:
        super().__init__(kernels, spec.dtype)
        self.inputs = spec.shape[1]
        if weight.codes.is_floating_point():
            weight = _as_bytes(weight)
        self.order = _order(weight)
        """[inputs] int64: the inputs by group. None: they are in order."""
        if self.order is not None:
            weight = replace(weight, codes=weight.codes[:, self.order], groups=None)
        self.bits = weight.bits
        self.is_packed = weight.bits <= 4
        self.is_coded = is_coded(weight)
        groups = weight.scales.shape[1]
        self.group = self.inputs // groups if groups > 1 else 0
        """Inputs that share a scale. 0: all do."""
        self.tile = next((tile for tile in _TILES if self.group % tile == 0), _TILES[0])
        if self.is_coded:
            self.tile = _CODED_TILE
        self.groups = weight.groups
        """[inputs]: the group of each input, if a tile has inputs of several groups."""
        if self.groups is None and self.group % self.tile:
            self.groups = torch.arange(self.inputs, device=weight.codes.device) // self.group
        self.codes = _store(weight.codes, self.tile, self.is_packed)
        if self.is_coded:
            self.codes = self.codes.bitwise_xor_(128).view(torch.int8)
        self.scales = _compact(weight.scales, spec.dtype)
        self.zeros = None if weight.zeros is None else _compact(weight.zeros, torch.uint8)
        self.mins = None if weight.mins is None else _compact(weight.mins, spec.dtype)
        self.values = weight.values
        self.is_e2m1 = _is_e2m1(weight)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Any = linear
        if torch.compiler.is_compiling():
            product = torch.ops.toolkit_lm_triton.quantized_linear
        out: Tensor = product(
            x if self.order is None else x[:, self.order],
            self.codes,
            self.scales,
            self.zeros,
            self.mins,
            None if self.is_e2m1 else self.values,
            self.groups,
            bias,
            self.inputs,
            self.group,
            self.tile,
            self.bits,
            self.is_e2m1,
        )
        return out

    def constants(self) -> dict[str, Any]:
        """Constants of the kernels."""
        has_zero = self.values is None and not self.is_coded
        return {
            "ZERO": 2 ** (self.bits - 1) if has_zero else 0,
            "GROUP": self.group,
            "PACKED": self.is_packed,
            "TILE": self.tile,
            "E2M1": self.is_e2m1,
        }

    def layout(self) -> tuple[object, ...]:
        """Two weights with the same layout may be multiplied by one kernel."""
        # Bytes, since NaN is not itself.
        values = None if self.values is None else bytes(self.values.view(torch.uint8).tolist())
        return (
            self.codes.shape,
            self.codes.dtype,
            self.dtype,
            self.zeros is None,
            self.mins is None,
            values,
            *self.constants().values(),
        )

    def dequantized(self) -> Tensor:
        return self.embed(torch.arange(len(self.codes), device=self.codes.device))

    def embed(self, ids: Tensor) -> Tensor:
        codes = self.codes[ids]
        if self.is_coded:
            codes = codes.view(torch.uint8).bitwise_xor_(128)
        if self.is_packed:
            runs = codes.view(len(ids), codes.shape[1] // self.tile, self.tile)
            codes = torch.stack([runs & 15, runs >> 4], dim=2).flatten(1)
        rows = QuantizedWeight(
            codes=codes[:, : self.inputs],
            bits=self.bits,
            scales=self.scales[:, ids].T.float(),
            zeros=None if self.zeros is None else self.zeros[:, ids].T.float(),
            mins=None if self.mins is None else self.mins[:, ids].T.float(),
            values=self.values,
            groups=self.groups,
        ).dequantized()
        if self.order is not None:
            rows = torch.empty_like(rows).index_copy_(1, self.order, rows)
        return rows.to(self.dtype)


class ScaledProduct(QuantizedMethod):
    """A weight in float8 with one scale per output. Each row of x is rounded to float8 by a scale
    of its own, and the GPU multiplies both as they are: `torch._scaled_mm`."""

    def __init__(self, weight: QuantizedWeight, spec: LinearSpec, kernels: Gates) -> None:
        super().__init__(kernels, spec.dtype)
        self.codes = weight.codes
        self.scales = weight.scales.T.contiguous()

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.device.type == "cuda":
            codes, scales = quantize_rows(x, power_of_2(x.shape[1]), self.codes.dtype)
            return self._product(codes, scales, x.dtype, bias)
        largest = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True, dtype=torch.float32)
        # A row of zeros has a scale too.
        scales = largest.clamp_(min=1e-30).div_(_FLOAT8)
        return self._product((x / scales).to(self.codes.dtype), scales, x.dtype, bias)

    def _product(
        self, codes: Tensor, scales: Tensor, dtype: torch.dtype, bias: Tensor | None
    ) -> Tensor:
        out: Tensor = torch._scaled_mm(
            codes, self.codes.T, scale_a=scales, scale_b=self.scales, out_dtype=dtype
        )
        return out if bias is None else out.add_(bias)

    def dequantized(self) -> Tensor:
        return (self.codes.float() * self.scales.T).to(self.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        # PyTorch has no index for float8.
        codes = self.codes.view(torch.uint8)[ids].view(self.codes.dtype)
        return (codes.float() * self.scales[0, ids, None]).to(self.dtype)


def is_coded(weight: QuantizedWeight) -> bool:
    """Whether a weight is multiplied as integers of 8 bits."""
    return (
        weight.bits == 8
        and not weight.codes.is_floating_point()
        and _has_scales_of_outputs_alone(weight)
    )


def is_scaled(weight: QuantizedWeight, spec: LinearSpec) -> bool:
    """Whether a weight is multiplied by `torch._scaled_mm`: in float8, on a GPU that can."""
    return (
        weight.codes.dtype is torch.float8_e4m3fn
        and _has_scales_of_outputs_alone(weight)
        # With scales for rows it gives results in no other dtype.
        and spec.dtype is torch.bfloat16
        and not any(size % _ALIGNMENT for size in spec.shape)
        and multiplies_float8(weight.codes.device)
    )


def linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    mins: Tensor | None,
    values: Tensor | None,
    groups: Tensor | None,
    bias: Tensor | None,
    inputs: int,
    group: int,
    tile: int,
    bits: int,
    is_e2m1: bool,
) -> Tensor:
    """x W^T + bias, with W in the layout of QuantizedProduct."""
    rows = len(x)
    outputs = len(codes)
    if not rows:
        return x.new_empty(0, outputs)
    if x.stride(1) != 1:
        x = x.contiguous()
    dtype = x.dtype
    weight = (codes, scales, zeros, mins, values, groups)
    is_coded = codes.dtype is torch.int8
    constants = {
        "ZERO": 0 if values is not None or is_e2m1 or is_coded else 2 ** (bits - 1),
        "GROUP": group,
        "PACKED": bits <= 4,
        "TILE": tile,
        "E2M1": is_e2m1,
    }
    if rows > _MANY_ROWS and not is_coded:
        return _dequantized_linear(x, weight, bias, inputs, constants)
    x_scales = None
    if is_coded:
        x, x_scales = quantize_rows(x, tile, torch.int8)
    choice = choose(rows, outputs, codes.shape[1] // tile, x.element_size())
    programs = -(-rows // choice.rows)
    return launch(x, x_scales, weight, bias, None, inputs, dtype, choice, programs, constants)


def launch(
    x: Tensor,
    x_scales: Tensor | None,
    weight: tuple[Tensor | None, ...],
    bias: Tensor | None,
    pieces: Tensor | None,
    inputs: int,
    dtype: torch.dtype,
    choice: Choice,
    programs: int,
    constants: dict[str, Any],
) -> Tensor:
    """x W^T + bias. `programs`: those that share out the rows."""
    from toolkit_lm_triton.kernels import quantized

    codes = weight[0]
    assert codes is not None
    rows = len(x)
    outputs, width = codes.shape[-2:]
    tiles = width // constants["TILE"]
    of_split = -(-tiles // choice.splits)
    splits = -(-tiles // of_split)
    out = x.new_empty(splits, rows, outputs, dtype=torch.float32 if splits > 1 else dtype)
    quantized.product[-(-outputs // choice.outputs), programs, splits](
        *(x, x_scales, *weight, bias, pieces, out),
        *(rows, inputs, outputs, x.stride(0), width, of_split),
        **constants,
        ROWS=choice.rows,
        OUTPUTS=choice.outputs,
        num_warps=choice.warps,
        num_stages=choice.stages,
        **LAUNCH,
    )
    return out[0] if splits == 1 else out.sum(0).to(dtype)


class Choice(NamedTuple):
    """Sizes of a product's programs."""

    rows: int
    outputs: int
    splits: int
    """Programs that share out the inputs."""
    warps: int = 4
    stages: int = 3
    """Tiles that are on their way at a time."""


def choose(rows: int, outputs: int, tiles: int, element_size: int, experts: int = 1) -> Choice:
    """Sizes for a number of rows, of outputs, and of tiles that a weight's inputs are. `experts`:
    those that have so many rows each."""
    is_few = rows <= _FEW_ROWS
    # In 4 bytes a larger tile would not fit the memory of a program.
    wide = 128 if element_size < 4 else 64
    block = (_FEW_ROWS, 32) if is_few else (min(wide, power_of_2(rows)), wide)
    programs = -(-outputs // block[1]) * -(-rows // block[0]) * experts
    # Few rows make few programs, which share out the inputs. Sums of many rows are much to write.
    most = _PROGRAMS if is_few else _PROGRAMS // 4
    splits = min(max(most // programs, 1), -(-tiles // 4))
    return Choice(*block, splits, warps=8 if block[0] * block[1] >= 128 * 128 else 4)


def _dequantized_linear(
    x: Tensor,
    weight: tuple[Tensor | None, ...],
    bias: Tensor | None,
    inputs: int,
    constants: dict[str, Any],
) -> Tensor:
    """x W^T + bias by PyTorch's product. W is dequantized, some outputs at a time."""
    from toolkit_lm_triton.kernels import quantized

    codes = weight[0]
    assert codes is not None
    outputs = len(codes)
    out = x.new_empty(len(x), outputs)
    step = max(1, min(outputs, _DEQUANTIZED // inputs))
    dense = x.new_empty(step, inputs)
    for first in range(0, outputs, step):
        count = min(step, outputs - first)
        quantized.dequantize[-(-count // 32), codes.shape[1] // constants["TILE"]](
            *(*weight, dense, inputs, outputs, codes.shape[1], first, count),
            **constants,
            OUTPUTS=32,
            **LAUNCH,
        )
        torch.mm(x, dense[:count].T, out=out[:, first : first + count])
    return out if bias is None else out.add_(bias)


def quantize_rows(x: Tensor, tile: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [R, inputs] -> codes [R, inputs] of int8 or float8_e4m3fn, and a float32 scale for each
    tile of a row."""
    from toolkit_lm_triton.kernels import quantized

    rows, inputs = x.shape
    tiles = -(-inputs // tile)
    codes = torch.empty(rows, inputs, dtype=dtype, device=x.device)
    scales = torch.empty(rows, tiles, dtype=torch.float32, device=x.device)
    quantized.quantize_rows[rows, tiles](
        *(x, codes, scales, inputs, x.stride(0)),
        TILE=tile,
        GREATEST=127 if dtype is torch.int8 else int(_FLOAT8),
        num_warps=min(max(tile // 512, 1), 8),
        **LAUNCH,
    )
    return codes, scales


def _has_scales_of_outputs_alone(weight: QuantizedWeight) -> bool:
    others = (weight.zeros, weight.mins, weight.values, weight.groups)
    return weight.scales.shape[1] == 1 and all(other is None for other in others)


def _is_e2m1(weight: QuantizedWeight) -> bool:
    """Whether codes are numbers of 4 bits, which are computed and not looked up."""
    if weight.values is None or weight.values.shape != (16,):
        return False
    return weight.values.tolist() == [*_E2M1, *(-value for value in _E2M1)]


def _as_bytes(weight: QuantizedWeight) -> QuantizedWeight:
    """Float8 as codes of a table: GPUs of any kind look it up."""
    every = torch.arange(256, dtype=torch.uint8, device=weight.codes.device)
    values = every.view(weight.codes.dtype).float()
    return replace(weight, codes=weight.codes.view(torch.uint8), values=values)


def _order(weight: QuantizedWeight) -> Tensor | None:
    """The inputs by group, [inputs] int64, if groups are of equal size; else None."""
    if weight.groups is None:
        return None
    sizes = weight.groups.bincount(minlength=weight.scales.shape[1])
    return weight.groups.argsort(stable=True) if bool((sizes == sizes[0]).all()) else None


def _store(codes: Tensor, tile: int, is_packed: bool) -> Tensor:
    """Codes [outputs, inputs] as the kernel reads them: whole tiles, and packed in pairs of
    tiles."""
    run = 2 * tile if is_packed else tile
    filled = F.pad(codes, (0, -codes.shape[1] % run))
    if not is_packed:
        return filled.contiguous()
    halves = filled.view(len(codes), -1, 2, tile)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def _compact(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [outputs, G] float32 -> [G, outputs], in a dtype if that loses nothing."""
    narrow = x.to(dtype)
    return (narrow if torch.equal(narrow.float(), x) else x).T.contiguous()


# To a compiler a product is one opaque op.
_NAME = "toolkit_lm_triton"
_library: Any = torch.library.Library(_NAME, "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "quantized_linear(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? mins, Tensor? "
    "values, Tensor? groups, Tensor? bias, int inputs, int group, int tile, int bits, bool "
    "is_e2m1) -> Tensor"
)
_library.impl("quantized_linear", linear, "CompositeExplicitAutograd")
torch.library.register_fake(
    "toolkit_lm_triton::quantized_linear",
    lambda x, codes, *rest: x.new_empty(x.shape[0], codes.shape[0]),
    lib=_library,
)
