"""Parameters that hold one rank's shard, and their loaders, which fill it from the full tensors of
a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from toolkit_lm.config import ParallelConfig
from toolkit_lm.errors import CheckpointError, ConfigError


class WeightLoader(Protocol):
    """Fills a parameter. It is the parameter's attribute `weight_loader`. A parameter without one
    takes the whole tensor."""

    def __call__(self, param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
        """Copies this rank's share of `loaded`, a tensor of the checkpoint, into `param`.

        `shard_id` is the index among the checkpoint's tensors that are packed into `param`. None:
        `loaded` holds all of them, packed. Raises CheckpointError if the shape does not fit.
        """


@dataclass(frozen=True, slots=True)
class Shard:
    """Share of one rank in one tensor of the checkpoint, along the sharded axis: [start, start +
    size) of its `full` entries.

    Entries past the end are padding, and zero.
    """

    full: int
    start: int
    size: int

    @classmethod
    def whole(cls, full: int) -> Shard:
        """The share of an unsharded tensor: each rank holds all of it."""
        return cls(full, 0, full)

    @classmethod
    def even(cls, full: int, parallel: ParallelConfig, subject: str) -> Shard:
        """The share of this rank if the ranks of a tensor parallel group hold equal shares. Raises
        ConfigError, which names `subject`, if the division is not even."""
        ranks = parallel.tensor_parallel_size
        if full % ranks:
            raise ConfigError(
                f"{subject}: {full} cannot be split evenly over tensor_parallel_size={ranks}."
            )
        size = full // ranks
        return cls(full, parallel.tensor_parallel_rank * size, size)

    def stored(self, subject: str, *, pack: int = 1, group: int = 1) -> Shard:
        """Converts the share to stored elements. One element holds `pack` entries, or applies to a
        `group` of them, as a scale does.

        A share may lie within a group, but not within a pack. Raises ConfigError, which names
        `subject`, for a share that cuts an element.
        """
        unit = pack * group
        end = self.start + self.size
        first = self.start // unit
        last = -(-end // unit)
        is_cut = self.start % unit or (end % unit and end < self.full)
        if is_cut and (pack > 1 or last - first > 1):
            raise ConfigError(
                f"{subject}: the share of {self.size} from {self.start} on cuts what is stored for "
                f"{unit} together."
            )
        return Shard(-(-self.full // unit), first, last - first)


@dataclass(frozen=True, slots=True)
class ShardLoader:
    """The WeightLoader of a parameter that holds `shards`, concatenated along axis `dim`."""

    shards: tuple[Shard, ...]
    dim: int = 0

    def __call__(self, param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
        if shard_id is None and len(self.shards) > 1:
            sizes = [shard.full for shard in self.shards]
            self._check(param, loaded, sum(sizes))
            for index, piece in enumerate(torch.split(loaded, sizes, self.dim)):
                self(param, piece, index)
            return
        index = shard_id or 0
        shard = self.shards[index]
        self._check(param, loaded, shard.full)
        target = param.data.narrow(self.dim, sum(p.size for p in self.shards[:index]), shard.size)
        start = min(shard.start, shard.full)
        count = min(shard.size, shard.full - start)
        target.narrow(self.dim, 0, count).copy_(loaded.narrow(self.dim, start, count))
        target.narrow(self.dim, count, shard.size - count).zero_()

    def _check(self, param: Tensor, loaded: Tensor, full: int) -> None:
        check_fits(param, loaded, (*param.shape[: self.dim], full, *param.shape[self.dim + 1 :]))


def check_fits(param: Tensor, loaded: Tensor, shape: Sequence[int]) -> None:
    """Raises CheckpointError unless `loaded` has `shape` and a dtype that `param` can take without
    a change of meaning."""
    if tuple(loaded.shape) != tuple(shape):
        raise CheckpointError(f"has shape {list(loaded.shape)}, not {list(shape)}")
    if param.is_floating_point() and (not loaded.is_floating_point() or loaded.itemsize < 2):
        raise CheckpointError(f"is quantized ({str(loaded.dtype).removeprefix('torch.')})")


def load_whole(param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
    """The WeightLoader of a parameter without one: copies `loaded` whole."""
    assert shard_id is None, "a parameter that packs several tensors needs a weight_loader"
    check_fits(param, loaded, param.shape)
    param.data.copy_(loaded)


def new_parameter(shape: Sequence[int], dtype: torch.dtype, loader: WeightLoader) -> nn.Parameter:
    """Makes an uninitialized parameter of `shape` (the shard's), on the default device, that
    `loader` fills."""
    param = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
    param.weight_loader = loader  # type: ignore[attr-defined]
    return param


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a resolved config names: "float32", "bfloat16", "float16"."""
    dtype = getattr(torch, name, None)
    assert isinstance(dtype, torch.dtype), f"{name!r} is no dtype: the config is not resolved"
    return dtype
