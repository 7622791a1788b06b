"""How much memory the KV cache takes."""

from __future__ import annotations

from toolkit_lm.config import CacheConfig, parse_memory
from toolkit_lm.errors import CapacityError

# What `auto` takes: of a GPU nearly all that is free; of a host, which others use too, a quarter and no more than this.
_AUTO_GPU_FRACTION = 0.9
_AUTO_HOST_FRACTION = 0.25
_AUTO_HOST_BYTES = 4 * 2**30


def kv_cache_bytes(config: CacheConfig, device: str, free: int) -> int:
    """Bytes for the KV cache, as `kv_cache_memory` says, of a device with `free` bytes to spare."""
    if config.kv_cache_memory == "auto":
        if device.startswith("cpu"):
            return min(int(free * _AUTO_HOST_FRACTION), _AUTO_HOST_BYTES)
        return int(free * _AUTO_GPU_FRACTION)
    amount = parse_memory(config.kv_cache_memory)
    return int(free * amount) if isinstance(amount, float) else amount


def host_bytes(config: CacheConfig, free: int) -> int:
    """Bytes for the pool that requests are swapped to, as `swap_memory` says, of a host with `free` bytes to spare."""
    if config.swap_memory is None:
        return 0
    amount = parse_memory(config.swap_memory)
    wanted = int(free * amount) if isinstance(amount, float) else amount
    if wanted > free:
        raise CapacityError(f"swap_memory is {wanted / 2**20:.0f} MiB, but the host has {max(free, 0) / 2**20:.0f} MiB free.")
    return wanted
