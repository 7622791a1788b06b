"""The dictionary itself."""

from concurrent.futures import Future

from toolkit_lm.kv import BlockBytes, KVTierStore


class MemoryStore(KVTierStore):
    """The half on the worker."""

    def __init__(self, config, kv_cache, *, options):
        self.blocks: dict[tuple[int, bytes], bytes] = {}

    def store(self, group: int, key: bytes, block: BlockBytes) -> None:
        self.blocks[group, key] = block.to_bytes()

    def load(self, group: int, key: bytes) -> Future[bytes]:
        future: Future[bytes] = Future()
        future.set_result(self.blocks[group, key])
        return future

    def drop(self, group: int, key: bytes) -> None:
        self.blocks.pop((group, key), None)
