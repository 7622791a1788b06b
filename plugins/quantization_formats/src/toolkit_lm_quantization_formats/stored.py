"""Stored tensors: how they lie over the outputs and inputs of a weight, and how a rank's share of
them is loaded and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import LinearSpec, Shard
from torch import Tensor, nn

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FP8 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a stored tensor."""

    of: Literal["outputs", "inputs", "all inputs", "parts", "one"]
    """The kind of its entries. "all inputs": each rank holds the whole axis. "parts": one element
    for each of the weights that a layer packs. "one": a single element."""
    pack: int = 1
    """Entries that are stored together."""
    words: int = 1
    """Elements that hold `pack` entries."""
    group: int = 1
    """Entries that one element applies to."""

    def length(self, full: int) -> int:
        """Elements of `full` entries."""
        return -(-full * self.words // self.pack) if self.group == 1 else -(-full // self.group)

    def share(self, shard: Shard, noun: str) -> Shard:
        """A rank's share in elements. Raises ConfigError, which names `noun`, for one that cuts
        what is stored together, or lies in several groups of inputs and cuts one."""
        if self.group > 1 and self.of == "outputs":
            first = shard.start // self.group
            last = self.length(shard.start + shard.size)
            return Shard(self.length(shard.full), first, last - first)
        shared = shard.stored(noun, pack=self.pack, group=self.group)
        if self.group > 1:
            return shared
        return Shard(self.length(shard.full), shared.start * self.words, self.length(shard.size))


ONE = Axis("one")
PARTS = Axis("parts")
OUTPUTS = Axis("outputs")
INPUTS = Axis("inputs")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a layer in the checkpoint, and in this rank's parameter."""

    axes: tuple[Axis, ...]
    dtype: torch.dtype = torch.float32
    """The parameter's. The checkpoint's is the same, but any float may become float32, and a
    power of two in E8M0 float32 or the bits of uint8."""
    most: int | None = None
    """The largest value of integers. None: any value."""
    least: int = 0
    """The smallest one, where the largest is stated."""
    positive: bool = False
    """Whether all values are above 0."""

    def parameter(self, spec: LinearSpec) -> nn.Parameter:
        """This rank's parameter, uninitialized, with its loader. Raises ConfigError."""
        loader = StoredLoader(spec, self)
        shape = [sum(part.size for part in loader.shares(axis)) for axis in self.axes]
        param = nn.Parameter(torch.empty(shape, dtype=self.dtype), requires_grad=False)
        param.weight_loader = loader  # type: ignore[attr-defined]
        param.most = self.most  # type: ignore[attr-defined]
        param.least = self.least  # type: ignore[attr-defined]
        return param


@dataclass(frozen=True, slots=True)
class StoredLoader:
    """The WeightLoader of a stored tensor."""

    spec: LinearSpec
    stored: Stored

    def shares(self, axis: Axis) -> list[Shard]:
        """This rank's shares along an axis, one after the other: one for each part of the outputs,
        or one."""
        spec = self.spec
        if axis.of == "outputs":
            noun = f"outputs of {spec.prefix}"
            return [axis.share(part, noun) for part in spec.outputs]
        if axis.of == "inputs":
            return [axis.share(spec.inputs, f"inputs of {spec.prefix}")]
        if axis.of == "all inputs":
            return [Shard.whole(axis.length(spec.inputs.full))]
        if axis.of == "parts":
            return [Shard(1, 0, 1) for _ in spec.outputs]
        return [Shard.whole(1)]

    def __call__(self, param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
        loaded = self._checked(loaded)
        count = len(self.spec.outputs)
        if shard_id is not None or count == 1:
            self._copy(param, loaded, shard_id or 0)
            return
        # The checkpoint holds the parts as one weight: what applies to all of it is each one's.
        axis = next(
            (
                index
                for index, stored_axis in enumerate(self.stored.axes)
                if stored_axis.of == "outputs"
            ),
            None,
        )
        if axis is None:
            for index in range(count):
                self._copy(param, loaded, index)
            return
        sizes = [part.full for part in self.shares(self.stored.axes[axis])]
        of = self.stored.axes[axis]
        unit = of.pack * of.group
        if cut := [part.full for part in self.spec.outputs[:-1] if part.full % unit]:
            raise CheckpointError(
                f"holds {count} weights as one, and one of {cut[0]} outputs cuts what is stored "
                f"for {unit} together"
            )
        loaded = self._fitting(loaded, [*self._expected(0)[:axis], sum(sizes)], axis)
        for index, piece in enumerate(torch.split(loaded, sizes, axis)):
            self._copy(param, piece, index)

    def _expected(self, index: int) -> list[int]:
        """Shape of one part's tensor in the checkpoint."""
        return [
            shares[index if len(shares) > 1 else 0].full
            for shares in map(self.shares, self.stored.axes)
        ]

    def _fitting(self, loaded: Tensor, front: Sequence[int], axis: int) -> Tensor:
        expected = [*front, *self._expected(0)[axis + 1 :]]
        return _reshaped(loaded, expected)

    def _copy(self, param: Tensor, loaded: Tensor, index: int) -> None:
        target = param.data
        loaded = _reshaped(loaded, self._expected(index))
        for dim, axis in enumerate(self.stored.axes):
            shares = self.shares(axis)
            place = index if len(shares) > 1 else 0
            part = shares[place]
            target = target.narrow(dim, sum(p.size for p in shares[:place]), part.size)
            start = min(part.start, part.full)
            count = min(part.size, part.full - start)
            if count < part.size:
                # A vocabulary is padded to a multiple of the number of ranks.
                target.narrow(dim, count, part.size - count).zero_()
                target = target.narrow(dim, 0, count)
            loaded = loaded.narrow(dim, start, count)
        target.copy_(loaded)

    def _checked(self, loaded: Tensor) -> Tensor:
        """Raises CheckpointError for a wrong dtype, and for values that cannot be."""
        wanted = self.stored.dtype
        if loaded.dtype is E8M0:
            if not bool((loaded.view(torch.uint8) < 255).all()):
                raise CheckpointError("has values that are not finite")
            if wanted is torch.uint8:
                return loaded.view(torch.uint8)
            if wanted is torch.float32:
                return loaded.float()
        accepted = FLOATS if wanted is torch.float32 else (wanted,)
        if loaded.dtype not in accepted:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in accepted)
            raise CheckpointError(
                f"has dtype {str(loaded.dtype).removeprefix('torch.')}, not {names}"
            )
        if not _is_finite(loaded):
            raise CheckpointError("has values that are not finite")
        least = self.stored.least
        most = self.stored.most
        if most is not None and not bool(((loaded >= least) & (loaded <= most)).all()):
            raise CheckpointError(f"has values outside of {least} to {most}")
        if self.stored.positive and not bool((loaded > 0).all()):
            raise CheckpointError("has values that are not above 0")
        return loaded


@dataclass(frozen=True, slots=True)
class ShapeLoader:
    """The WeightLoader of a tensor that states the shape of the weight."""

    spec: LinearSpec

    def __call__(self, param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
        outputs = self.spec.outputs
        full = sum(part.full for part in outputs) if shard_id is None else outputs[shard_id].full
        expected = [full, self.spec.inputs.full]
        if loaded.numel() != 2 or loaded.flatten().tolist() != expected:
            stated = loaded.flatten()[:4].tolist()
            raise CheckpointError(f"says {stated}, and config.json {expected}")


def passed_over(param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
    """The WeightLoader of a tensor that nothing computes with."""
    if loaded.is_floating_point() and not _is_finite(loaded):
        raise CheckpointError("has values that are not finite")


def check_groups(spec: LinearSpec, size: int) -> None:
    """Raises CheckpointError unless the groups divide the inputs."""
    if spec.inputs.full % size:
        raise CheckpointError(
            f"{spec.prefix}: groups of {size} inputs do not divide its {spec.inputs.full} inputs"
        )


def run_groups(spec: LinearSpec, size: int) -> Tensor | None:
    """The group [K] of each of this rank's inputs, counted from the first that it holds, where
    groups are runs of `size` inputs. None: runs of equal length."""
    start = spec.inputs.start % size
    whole = spec.inputs.size % size == 0 and start == 0
    if whole or start + spec.inputs.size <= size:
        return None
    return (torch.arange(spec.inputs.size) + start) // size


def of_rows(spec: LinearSpec, stored: Tensor, group: int | None = None) -> Tensor:
    """[rows stored, ...] -> [N, ...]: the one that applies to each of this rank's outputs. One is
    stored for each part (`group` None), or for each `group` of a part's outputs."""
    indices = []
    first = 0
    for part in spec.outputs:
        if group is None:
            indices.append(torch.full((part.size,), first))
            first += 1
            continue
        rows = torch.arange(part.start, part.start + part.size) // group
        begin = part.start // group
        indices.append(rows - begin + first)
        first += -(-(part.start + part.size) // group) - begin
    return stored[torch.cat(indices).to(stored.device)]


def _reshaped(loaded: Tensor, expected: Sequence[int]) -> Tensor:
    """Axes of one element may be stored or not. Raises CheckpointError for another shape."""
    if [size for size in loaded.shape if size != 1] != [size for size in expected if size != 1]:
        raise CheckpointError(f"has shape {list(loaded.shape)}, not {list(expected)}")
    return loaded.reshape(*expected)


def _is_finite(loaded: Tensor) -> bool:
    if loaded.dtype is FP8:
        return not bool((loaded.view(torch.uint8) & 0x7F == 0x7F).any())
    if loaded.dtype is torch.float8_e5m2:
        return not bool((loaded.view(torch.uint8) & 0x7C == 0x7C).any())
    return not loaded.is_floating_point() or bool(torch.isfinite(loaded).all())
