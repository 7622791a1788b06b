"""HostStore: the tier in host memory that preempted requests are swapped to."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, ClassVar

import torch

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv.cache import zeros
from toolkit_lm.kv.layout import KVCacheConfig
from toolkit_lm.kv.tier import BlockBytes, Data, KVTierStore
from toolkit_lm.messages import TierKey


class HostStore(KVTierStore):
    """One buffer of bytes [num_host_blocks, block_bytes] per pool, allocated once. Its keys are
    indices that `BlockManager` assigns. It is not searched by content."""

    checked: ClassVar[bool] = False

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        self._groups = kv_cache.groups
        pinned = config.device.device.startswith("cuda")
        self._memory = [
            zeros((pool.num_host_blocks, pool.block_bytes), torch.device("cpu"), pinned=pinned)
            for pool in kv_cache.pools
        ]

    def store(self, group: int, key: TierKey, block: BlockBytes) -> None:
        block.read_into(self._place(group, key)[: block.num_bytes])

    def load(self, group: int, key: TierKey) -> Future[Data]:
        future: Future[Data] = Future()
        layers = len(self._groups[group].layers)
        future.set_result(self._place(group, key)[: layers * self._groups[group].spec.page_bytes])
        return future

    def _place(self, group: int, key: TierKey) -> memoryview:
        assert isinstance(key, int), "the host keeps blocks by their places"
        return self._memory[self._groups[group].pool][key].numpy().data
