"""Sizes of the KV cache and of the host's swap memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from toolkit_lm.config import CacheConfig, VllmConfig, parse_memory
from toolkit_lm.errors import CapacityError
from toolkit_lm.kv import KVCacheConfig

# Memory that `auto` uses: nearly all free memory of a GPU. A host is shared, so a quarter of its
# free memory, and no more than this.
_AUTO_GPU_FRACTION = 0.9
_AUTO_HOST_FRACTION = 0.25
_AUTO_HOST_BYTES = 4 * 2**30

_CACHED_SEQUENCES = 64
"""Number of sequences of max_model_len that the cache holds at least, if there is enough memory."""
_USUAL_TOKENS = 1024
"""Length of a usual sequence. Several pools are sized so that they run full together with sequences
of this length."""


def kv_cache_bytes(config: CacheConfig, device: str, free: int) -> int:
    """Bytes for the KV cache by `kv_cache_memory`, on a device with `free` bytes."""
    if config.kv_cache_memory == "auto":
        if device.startswith("cpu"):
            return min(int(free * _AUTO_HOST_FRACTION), _AUTO_HOST_BYTES)
        return int(free * _AUTO_GPU_FRACTION)
    amount = parse_memory(config.kv_cache_memory)
    return int(free * amount) if isinstance(amount, float) else amount


def host_bytes(config: CacheConfig, free: int) -> int:
    """Bytes for the pool of preempted requests by `swap_memory`, on a host with `free` bytes."""
    if config.swap_memory is None:
        return 0
    amount = parse_memory(config.swap_memory)
    wanted = int(free * amount) if isinstance(amount, float) else amount
    if wanted > free:
        raise CapacityError(
            f"swap_memory is {wanted / 2**20:.0f} MiB, but the host has "
            f"{max(free, 0) / 2**20:.0f} MiB free."
        )
    return wanted


def size_kv_cache(
    kv_cache: KVCacheConfig, config: VllmConfig, free: int, free_on_host: int
) -> KVCacheConfig:
    """Returns `kv_cache` with the number of blocks that its options give it, for these free bytes
    of a device and a host.

    `num_kv_blocks` counts the pool of which a long sequence holds the most blocks. The other pools
    hold as many sequences as that one.

    Engines that share the requests also share the host.

    Raises CapacityError if the bytes are not free, or if a single sequence of max_model_len does
    not fit.
    """
    cache = config.cache
    device = config.device.device
    each = [pool.block_bytes for pool in kv_cache.pools]
    if not each:
        return kv_cache
    least, lead, blocks = _shares(kv_cache, config)

    def num_bytes(num_blocks: list[int]) -> int:
        return sum(count * size for count, size in zip(num_blocks, each, strict=True))

    if cache.num_kv_blocks is None:
        memory = kv_cache_bytes(
            cache, device, free // (config.parallel.data_parallel_size if device == "cpu" else 1)
        )
    else:
        others = blocks(cache.num_kv_blocks)
        others[lead] = 0
        memory = cache.num_kv_blocks * each[lead] + num_bytes(others)
    if memory > free:
        raise CapacityError(
            f"the KV cache needs {memory / 2**20:.0f} MiB, but {device} has {free / 2**20:.0f} "
            "MiB free."
        )
    leading = cache.num_kv_blocks
    if leading is None:
        leading = bisect_right(
            range(1, memory // each[lead] + 1), memory, key=lambda count: num_bytes(blocks(count))
        )
    num_blocks = blocks(leading)
    for pool, (available, needed) in enumerate(zip(num_blocks, least, strict=True)):
        if available < needed:
            raise CapacityError(_too_small(config, memory, available, needed, each[pool]))
    on_host = host_bytes(
        cache,
        (free_on_host - (memory if device == "cpu" else 0)) // config.parallel.data_parallel_size,
    )
    scale = on_host / num_bytes(num_blocks)
    return kv_cache.sized(num_blocks, [int(count * scale) for count in num_blocks])


def _shares(
    kv_cache: KVCacheConfig, config: VllmConfig
) -> tuple[list[int], int, Callable[[int], list[int]]]:
    """Returns the blocks of the longest sequence per pool; the leading pool, of which a long
    sequence holds the most; and a function from blocks of the leading pool to blocks per pool."""
    cache = config.cache
    length = config.max_model_len
    chunk = config.scheduler.token_budget
    encoded = config.max_encoder_len
    least = kv_cache.max_blocks(length, chunk, encoded)
    kept = [
        sum(group.pool == pool and group.spec.snapshots > 0 for group in kv_cache.groups)
        for pool in range(len(least))
    ]
    """Per pool, snapshots of a sequence."""
    usual = kv_cache.max_blocks(min(length, _USUAL_TOKENS), chunk, min(encoded, _USUAL_TOKENS))
    # Blocks beyond those of all sequences at full length are used for cached prefixes only.
    num_seqs = max(
        config.scheduler.max_num_seqs,
        _CACHED_SEQUENCES if cache.enable_prefix_caching is not False else 1,
    )
    lead = max(range(len(least)), key=least.__getitem__, default=0)
    of_any_length = kv_cache.max_blocks(1, chunk, 1)

    def blocks(leading: int) -> list[int]:
        """Blocks per pool if the leading one has this many, without blocks that no sequence could
        use. Each of the others holds at least one sequence."""
        counts = [
            min(num_seqs * (blocks + more), max(blocks, leading * (share + more) // usual[lead]))
            for blocks, more, share in zip(least, kept, usual, strict=True)
        ]
        counts[lead] = min(num_seqs * (least[lead] + kept[lead]), leading)
        if cache.num_kv_blocks is not None:
            # The blocks that a sequence takes at any length never run out before those that grow:
            # each running sequence has a leading block.
            fixed = [
                pool
                for pool, blocks in enumerate(least)
                if pool != lead and blocks == of_any_length[pool]
            ]
            counts = [
                min(config.scheduler.max_num_seqs, leading) * (blocks + more)
                if pool in fixed
                else counts[pool]
                for pool, (blocks, more) in enumerate(zip(least, kept, strict=True))
            ]
        return counts

    return least, lead, blocks


def _too_small(config: VllmConfig, memory: int, available: int, needed: int, each: int) -> str:
    setting = f"num_kv_blocks is {config.cache.num_kv_blocks}"
    option = "num_kv_blocks"
    if config.cache.num_kv_blocks is None:
        size = f"{each / 2**10:.0f} KiB"
        setting = f"kv_cache_memory is {memory / 2**10:.0f} KiB, {available} blocks of {size}"
        option = "kv_cache_memory"
    return (
        f"the KV cache cannot hold one sequence of max_model_len {config.max_model_len}: it "
        f"takes {needed} blocks, but {setting}. "
        f"Lower max_model_len or raise {option}."
    )
