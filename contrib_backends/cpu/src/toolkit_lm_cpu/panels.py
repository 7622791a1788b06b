"""PanelLinear: a linear method with its weight in the kernels' layout."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from toolkit_lm.model import (
    NO_EPILOGUE,
    Epilogue,
    GatedColumnParallelLinear,
    LinearMethod,
    LinearSpec,
    Rows,
    UnquantizedMethod,
)
from torch import Tensor, nn

from toolkit_lm_cpu.added import Added
from toolkit_lm_cpu.arena import Arena
from toolkit_lm_cpu.library import _kernels, exported, product_type

LANES = exported("LANES")
"""Outputs of a panel."""
_LARGE = 2**25
"""Bytes from which on a weight is packed in pieces, so that it is never held twice."""
_SOME = 2**23
"""Bytes of a piece of a weight that is packed in pieces."""
ACTIVATIONS: Mapping[str | None, int] = {
    None: exported("PLAIN"),
    "relu": exported("RELU"),
    "silu": exported("SILU"),
    "swish": exported("SILU"),
    "gelu": exported("GELU"),
    "gelu_python": exported("GELU"),
    "gelu_accurate": exported("GELU_TANH"),
    "gelu_fast": exported("GELU_TANH"),
    "gelu_new": exported("GELU_TANH"),
    "gelu_pytorch_tanh": exported("GELU_TANH"),
    "quick_gelu": exported("QUICK_GELU"),
}
"""The kernels' number of an activation, by the name in the model's config."""
_GATES: Mapping[str | None, int] = {"clamped_swiglu": exported("CLAMPED_SWIGLU")}
"""Likewise of functions of gate and up together."""


def number_of(activation: str | None, gated: bool) -> int | None:
    """The kernels' number of what follows a product; None: they do not compute it."""
    return _GATES[activation] if gated and activation in _GATES else ACTIVATIONS.get(activation)


class PanelLinear(UnquantizedMethod):
    """A linear method with its weight in panels of 16 outputs.

    Each result is one sum in a fixed order, independent of the rest of the batch.
    """

    added: Added | None = None
    """Adapters of the step's rows."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.packed: Tensor | None = None
        self.is_halved = False
        """Whether the gate and up projections are packed apart, since a panel would hold outputs of
        both."""
        self.tied_to: LinearMethod | None = None

    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        super().create(layer, spec)
        self.tied_to = spec.tied_to
        self.memory = self.weight.data_ptr()
        """Address of the parameter's memory at creation. Memory that others put in its place
        remains theirs."""
        self.outputs, self.inputs = spec.shape
        self.dtype = spec.dtype
        self.type = product_type(spec.dtype, self.inputs)
        self.is_halved = (
            isinstance(layer, GatedColumnParallelLinear) and self.outputs % (2 * LANES) != 0
        )
        fills_panels = (
            all(shard.size % LANES == 0 for shard in spec.outputs[:-1])
            and spec.inputs.size == spec.inputs.full
        )
        self._loader = None
        if fills_panels and not self.is_halved and spec.tied_to is None:
            self._loader = PanelLoader(self, spec)
            self.weight.weight_loader = self._loader  # type: ignore[attr-defined]

    def process(self, layer: nn.Module) -> None:
        """Packs the weight, and empties the parameter.

        Other holders of the parameter see it empty, and must not read its former memory.
        """
        parameter = self.weight
        weight = parameter.data
        loader = self._loader
        tied = self.tied_to if isinstance(self.tied_to, PanelEmbedding) else None
        # An embedding of another kind goes on reading what it shares.
        is_own = weight.data_ptr() == self.memory and (tied is not None or self.tied_to is None)
        if loader is not None and loader.packed:
            for index in set(range(len(loader.shards))) - loader.packed:
                loader.pack(index, loader.rows_of(weight, index))
        else:
            loses = is_own and weight.nbytes >= _LARGE
            self.packed = pack(
                weight, self.type, self.arena, halves=2 if self.is_halved else 1, loses=loses
            )
        if is_own:
            parameter.data = weight.new_empty(0)
        self._loader = None
        del self.weight, layer.weight
        if tied is not None:
            tied.read(self)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.packed is None:
            return super().multiply(x, bias)
        if not self.is_halved:
            return _product(self.type, x, self.packed, self.outputs, bias)
        halves = self.packed.chunk(2)
        biases = (None, None) if bias is None else bias.chunk(2)
        return torch.cat(
            [_product(self.type, x, halves[i], self.outputs // 2, biases[i]) for i in range(2)],
            dim=1,
        )

    def dequantized(self) -> Tensor:
        if self.packed is None:
            return super().dequantized()
        # Each product is 1 times an element: exact.
        return self.multiply(torch.eye(self.inputs, dtype=self.dtype), None).T

    def likeliest(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
        if self.packed is None or self.is_halved:
            return None
        return likeliest(self.type, x, self.packed, self.outputs, bias)

    def apply(
        self,
        x: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue = NO_EPILOGUE,
        *,
        rows: Rows | Tensor = Rows.FLAT,
    ) -> Tensor:
        activation, gated, residual = epilogue
        fits = self.is_halved or self.outputs % (2 * LANES) == 0 if gated else not self.is_halved
        added = added_to(self.added, x, rows)
        number = number_of(activation, gated)
        if self.packed is None or number is None or not fits:
            if added is None:
                return super().apply(x, bias, epilogue)
            out = linear(self.type, x, self.packed, self.outputs, bias, 0, False, None, added)
            return epilogue.finish(out)
        product = _product if added is None else partial(linear, added=added)
        return product(self.type, x, self.packed, self.outputs, bias, number, gated, residual)


class PanelLoader:
    """The weight loader of PanelLinear. It packs rows straight from the checkpoint, without a copy.

    Three kinds of rows are copied into the parameter first: those of another dtype, of a shard with
    padding, and at odd addresses.
    """

    def __init__(self, method: PanelLinear, spec: LinearSpec) -> None:
        self.shards = spec.outputs
        self.packed: set[int] = set()
        """Indices of the parts that are packed already. The parameter holds nothing of them."""
        self._method = method
        self._copy = spec.loader()

    def __call__(self, param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
        sizes = [shard.full for shard in self.shards]
        whole = (sum(sizes), param.shape[1])
        is_one = shard_id is not None or len(sizes) == 1
        if not is_one and loaded.shape == whole:
            for index, piece in enumerate(torch.split(loaded, sizes)):
                self(param, piece, index)
            return
        index = shard_id or 0
        shard = self.shards[index]
        is_plain = (
            loaded.dtype is param.dtype
            and loaded.device.type == "cpu"
            and loaded.is_contiguous()
            and loaded.data_ptr() % 4 == 0
        )
        if (
            is_one
            and is_plain
            and param.data_ptr() == self._method.memory
            and loaded.shape == (shard.full, param.shape[1])
            and shard.start + shard.size <= shard.full
        ):
            self.pack(index, loaded[shard.start : shard.start + shard.size])
            self.packed.add(index)
        else:
            self._copy(param, loaded, shard_id)
            self.packed.discard(index)

    def rows_of(self, weight: Tensor, index: int) -> Tensor:
        """The rows of a shard in the parameter."""
        return weight.narrow(0, self._first(index), self.shards[index].size)

    def pack(self, index: int, rows: Tensor) -> None:
        """Packs the rows of a shard, [shard's size, inputs], contiguous."""
        method = self._method
        if method.packed is None:
            method.packed = method.arena.empty(
                -(-method.outputs // LANES) * LANES * method.inputs, rows.dtype
            )
        at = self._first(index) * method.inputs * rows.itemsize
        to = method.packed.data_ptr() + at
        _kernels.pack(
            method.type,
            weight=rows.data_ptr(),
            to=to,
            outputs=len(rows),
            inputs=method.inputs,
        )

    def _first(self, index: int) -> int:
        return sum(shard.size for shard in self.shards[:index])


class PanelEmbedding(UnquantizedMethod):
    """An embedding. If a PanelLinear head shares its weight, rows are read from the head's panels,
    so that the weight is held once."""

    head: PanelLinear | None = None

    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        super().create(layer, spec)
        self._layer = weakref.ref(layer)

    def read(self, head: PanelLinear) -> None:
        """Reads rows from now on out of a head that shares this weight."""
        self.head = head
        if (layer := self._layer()) is not None and hasattr(layer, "weight"):
            del self.weight, layer.weight

    def dequantized(self) -> Tensor:
        return super().dequantized() if self.head is None else self.head.dequantized()

    def embed(self, ids: Tensor) -> Tensor:
        if self.head is None:
            return super().embed(ids)
        assert self.head.packed is not None
        if torch.compiler.is_compiling():
            rows: Tensor = torch.ops.toolkit_lm_cpu.embed(
                ids, self.head.packed, self.head.outputs, self.head.inputs
            )
            return rows
        return embed(ids, self.head.packed, self.head.outputs, self.head.inputs)


def embed(ids: Tensor, packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """Looks up rows [T, inputs] of a weight [outputs, inputs] in panels."""
    ids, out = ids.contiguous(), packed.new_empty(len(ids), inputs)
    # Pairs of bfloat16 lie together, as floats do.
    width = 2 if packed.dtype is torch.float16 else 4
    _kernels.embed(
        outputs,
        weights=packed.data_ptr(),
        ids=ids.data_ptr(),
        out=out.data_ptr(),
        tokens=len(ids),
        lanes=inputs * packed.itemsize // width,
        width=width,
    )
    return out


def _product(
    type: int,
    x: Tensor,
    packed: Tensor,
    outputs: int,
    bias: Tensor | None,
    activation: int = 0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    if torch.compiler.is_compiling():
        product: Tensor = torch.ops.toolkit_lm_cpu.linear(
            type, x, packed, outputs, bias, activation, gated, residual
        )
        return product
    return linear(type, x, packed, outputs, bias, activation, gated, residual)


def pack(
    weight: Tensor, type: int, arena: Arena, *, halves: int = 1, loses: bool = False
) -> Tensor:
    """Packs a contiguous weight [outputs, inputs] into panels.

    `halves`: 2 packs the first half of the rows, and then the second, into panels of their own.

    `loses`: the source's memory goes back to the system while it is packed. The source must not be
    read again.
    """
    outputs = len(weight) // halves
    inputs = weight.shape[1]
    size = -(-outputs // LANES) * LANES * inputs
    row = inputs * weight.itemsize
    packed = arena.empty(halves * size, weight.dtype)
    some = max(LANES, _SOME // max(1, row) // LANES * LANES) if loses else max(1, outputs)
    for half in range(halves):
        source = weight.data_ptr() + half * outputs * row
        target = packed.data_ptr() + half * size * weight.itemsize
        for first in range(0, outputs, some):
            count = min(some, outputs - first)
            at = first * row
            _kernels.pack(
                type,
                weight=source + at,
                to=target + at,
                outputs=count,
                inputs=inputs,
            )
            if loses:
                _kernels.lose(source + at, count * row)
    return packed


def added_to(added: Added | None, x: Tensor, rows: Rows | Tensor) -> Added | None:
    """Adapters of a product of x, whose rows are `rows`. None: there are none."""
    if added is None or rows is not Rows.FLAT or len(x) != added.step.num_rows:
        return None
    return added


def linear(
    type: int,
    x: Tensor,
    packed: Tensor | None,
    outputs: int,
    bias: Tensor | None,
    activation: int,
    gated: bool,
    residual: Tensor | None,
    added: Added | None = None,
) -> Tensor:
    """Computes activation(x W^T + bias) + residual, or the gated form, with `outputs` rows of W in
    panels; of W = 0, if it is None. `added` comes before the activation."""
    if x.stride(1) != 1 or x.stride(0) % 2:
        x = x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    rows, inputs = x.shape
    width = outputs // 2 if gated else outputs
    out = x.new_empty(rows, width)
    _kernels.linear(
        type,
        None if added is None else added.step.groups,
        None if added is None else added.low_ranks,
        weights=0 if packed is None else packed.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        outputs=width,
        inputs=inputs,
        activation=activation,
        is_gated=gated,
        x=x.data_ptr(),
        x_stride=x.stride(0),
        residual=0 if residual is None else residual.data_ptr(),
        residual_stride=0 if residual is None else residual.stride(0),
        out=out.data_ptr(),
        out_stride=width,
        rows=rows,
    )
    return out


def likeliest(
    type: int, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The greatest value and its index in each row of x W^T + bias, as `linear` would compute it.

    NaN counts as the greatest. Of equal values the first is taken.
    """
    if x.stride(1) != 1 or x.stride(0) % 2:
        x = x.contiguous()
    best = x.new_empty(len(x))
    indices = torch.empty(len(x), dtype=torch.int64)
    _kernels.likeliest_output(
        type,
        best.data_ptr(),
        indices.data_ptr(),
        weights=packed.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        outputs=outputs,
        inputs=x.shape[1],
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
    )
    return best, indices


# To a compiler a product is one opaque op.
_library: Any = torch.library.Library("toolkit_lm_cpu", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "linear(int type, Tensor x, Tensor packed, int outputs, Tensor? bias, int activation, bool "
    "gated, Tensor? residual) -> Tensor"
)
_library.impl("linear", linear, "CompositeExplicitAutograd")
_library.define("embed(Tensor ids, Tensor packed, int outputs, int inputs) -> Tensor")
_library.impl("embed", embed, "CompositeExplicitAutograd")
torch.library.register_fake(
    "toolkit_lm_cpu::embed",
    lambda ids, packed, outputs, inputs: packed.new_empty(ids.shape[0], inputs),
    lib=_library,
)
torch.library.register_fake(
    "toolkit_lm_cpu::linear",
    lambda type, x, packed, outputs, bias, activation, gated, residual: x.new_empty(
        x.shape[0], outputs // 2 if gated else outputs
    ),
    lib=_library,
)
