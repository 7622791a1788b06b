"""HostBlocks: a rank's evicted blocks in host memory."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import BlockBytes, Data, KVCacheConfig, KVTierStore
from toolkit_lm.messages import TierKey


class HostBlocks(KVTierStore):
    """The scheduler's half says which blocks stay."""

    checked: ClassVar[bool] = False

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        self._blocks: dict[tuple[int, TierKey], bytearray] = {}

    def store(self, group: int, key: TierKey, block: BlockBytes) -> None:
        data = bytearray(block.num_bytes)
        block.read_into(data)
        self._blocks[group, key] = data

    def load(self, group: int, key: TierKey) -> Future[Data]:
        future: Future[Data] = Future()
        future.set_result(self._blocks[group, key])
        return future

    def drop(self, group: int, key: TierKey) -> None:
        self._blocks.pop((group, key), None)

    def close(self) -> None:
        self._blocks.clear()
