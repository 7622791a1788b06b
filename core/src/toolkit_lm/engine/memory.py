"""How much memory the KV cache takes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from toolkit_lm.config import CacheConfig, VllmConfig, parse_memory
from toolkit_lm.errors import CapacityError
from toolkit_lm.kv import KVCacheConfig

# What `auto` takes: of a GPU nearly all that is free; of a host, which others use too, a quarter
# and no more than this.
_AUTO_GPU_FRACTION = 0.9
_AUTO_HOST_FRACTION = 0.25
_AUTO_HOST_BYTES = 4 * 2**30

_CACHED_SEQUENCES = 64
"""Of max_model_len: for how many the cache has room at least, where there is memory."""
_USUAL_TOKENS = 1024
"""Of a sequence: where there are several pools, they run full together when sequences are of this
length."""


def kv_cache_bytes(config: CacheConfig, device: str, free: int) -> int:
    """Bytes for the KV cache, as `kv_cache_memory` says, of a device with `free` bytes to spare."""
    if config.kv_cache_memory == "auto":
        if device.startswith("cpu"):
            return min(int(free * _AUTO_HOST_FRACTION), _AUTO_HOST_BYTES)
        return int(free * _AUTO_GPU_FRACTION)
    amount = parse_memory(config.kv_cache_memory)
    return int(free * amount) if isinstance(amount, float) else amount


def host_bytes(config: CacheConfig, free: int) -> int:
    """Bytes for the pool that requests are swapped to, as `swap_memory` says, of a host with `free`
    bytes to spare."""
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
    """`kv_cache` with as many blocks as its options give it, of a device and a host with so many
    bytes to spare.

    `num_kv_blocks` are those of the pool of which a long sequence holds the most: the other pools
    hold as many sequences as these do.

    Engines that share the requests share the host too.

    Raises CapacityError when they are not there, or a single sequence of max_model_len does not fit
    in them.
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
    for pool, (given, needed) in enumerate(zip(num_blocks, least, strict=True)):
        if given < needed:
            raise CapacityError(_too_small(config, memory, given, needed, each[pool]))
    on_host = host_bytes(
        cache,
        (free_on_host - (memory if device == "cpu" else 0)) // config.parallel.data_parallel_size,
    )
    scale = on_host / num_bytes(num_blocks)
    return kv_cache.sized(num_blocks, [int(count * scale) for count in num_blocks])


def _shares(
    kv_cache: KVCacheConfig, config: VllmConfig
) -> tuple[list[int], int, Callable[[int], list[int]]]:
    """Per pool, the blocks of the longest sequence; which pool leads, for a long one holds the most
    of it; and how many blocks each has by those of the leading one."""
    cache = config.cache
    length = config.max_model_len
    chunk = config.scheduler.token_budget
    encoded = config.max_encoder_len
    least = kv_cache.max_blocks(length, chunk, encoded)
    usual = kv_cache.max_blocks(min(length, _USUAL_TOKENS), chunk, min(encoded, _USUAL_TOKENS))
    # More than all sequences at full length is used for cached prefixes only.
    num_seqs = max(
        config.scheduler.max_num_seqs, _CACHED_SEQUENCES if cache.enable_prefix_caching else 1
    )
    lead = max(range(len(least)), key=least.__getitem__, default=0)
    of_any_length = kv_cache.max_blocks(1, chunk, 1)

    def blocks(leading: int) -> list[int]:
        """Per pool, where the leading one has so many, but for what no sequences could use. The
        others hold one sequence at least."""
        counts = [
            min(num_seqs * one, max(one, leading * share // usual[lead]))
            for one, share in zip(least, usual, strict=True)
        ]
        counts[lead] = min(num_seqs * least[lead], leading)
        if cache.num_kv_blocks is not None:
            # What a sequence takes at any length never runs out before what grows: each that runs
            # has a leading block.
            fixed = [
                pool
                for pool, one in enumerate(least)
                if pool != lead and one == of_any_length[pool]
            ]
            counts = [
                min(config.scheduler.max_num_seqs, leading) * one if pool in fixed else counts[pool]
                for pool, one in enumerate(least)
            ]
        return counts

    return least, lead, blocks


def _too_small(config: VllmConfig, memory: int, given: int, needed: int, each: int) -> str:
    what = f"num_kv_blocks is {config.cache.num_kv_blocks}"
    option = "--num-kv-blocks"
    if config.cache.num_kv_blocks is None:
        what = (
            f"kv_cache_memory is {memory / 2**10:.0f} KiB, {given} blocks of {each / 2**10:.0f} KiB"
        )
        option = "--kv-cache-memory"
    return (
        f"the KV cache cannot hold one sequence of max_model_len {config.max_model_len}: it "
        f"takes {needed} blocks, but {what}. "
        f"Lower --max-model-len or raise {option}."
    )
