"""Whether the shards of tensor parallel ranks make up the whole weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from toolkit_lm.model import Model, ShardLoader
from torch import Tensor, nn


def assert_shards(whole: nn.Module, ranks: Sequence[nn.Module]) -> None:
    """Each parameter of `whole` (loaded on one rank) is made up of those of `ranks` (loaded from
    the same checkpoint).

    A parameter that a ShardLoader fills is cut as it says: the ranks' shares equal the whole's and
    leave nothing out, and padding is zero. Its parts count stored elements, of which ranks may
    share one that is for a group of values. Any other parameter is the same on each rank.
    """
    shards = [dict(model.named_parameters()) for model in ranks]
    parameters = dict(whole.named_parameters())
    for rank, names in enumerate(shards):
        assert names.keys() == parameters.keys(), (
            f"rank {rank} has other parameters: {sorted(names.keys() ^ parameters.keys())}"
        )
    for name, param in parameters.items():
        _assert_parameter(name, param, [shard[name] for shard in shards])


def _assert_parameter(name: str, whole: Tensor, shards: Sequence[Tensor]) -> None:
    loaders = [getattr(shard, "weight_loader", None) for shard in shards]
    sharded = [loader for loader in loaders if isinstance(loader, ShardLoader)]
    if not sharded:
        for rank, shard in enumerate(shards):
            assert torch.equal(shard, whole), f"{name} is not sharded, but differs on rank {rank}"
        return
    assert len(sharded) == len(shards), f"{name} is sharded on some ranks only"
    dim = sharded[0].dim
    begin = 0
    for index, first in enumerate(sharded[0].shards):
        covered = torch.zeros(first.full, dtype=torch.bool)
        for rank, (shard, loader) in enumerate(zip(shards, sharded, strict=True)):
            share = loader.shards[index]
            mine = shard.narrow(dim, sum(p.size for p in loader.shards[:index]), share.size)
            count = max(0, min(share.size, share.full - share.start))
            expected = (
                whole.narrow(dim, begin + share.start, count) if count else mine.narrow(dim, 0, 0)
            )
            assert torch.equal(mine.narrow(dim, 0, count), expected), (
                f"{name}: rank {rank} holds other values than its share of the whole"
            )
            assert not mine.narrow(dim, count, share.size - count).any(), (
                f"{name}: rank {rank} has padding that is not zero"
            )
            covered[share.start : share.start + count] = True
        assert covered.all(), (
            f"{name}: no rank holds entries {(~covered).nonzero()[:, 0].tolist()[:10]} of "
            f"shard {index}"
        )
        begin += first.full


def is_sharded(model: Model) -> Mapping[str, bool]:
    """Whether a parameter holds less than the whole, by name."""
    loaders = {
        name: getattr(param, "weight_loader", None) for name, param in model.named_parameters()
    }
    return {
        n: isinstance(loader, ShardLoader) and any(p.size < p.full for p in loader.shards)
        for n, loader in loaders.items()
    }
