"""How much memory a device can spare for the KV cache."""

from __future__ import annotations

import os

import torch

from llm_toolkit.config import CacheConfig, parse_memory

# What `auto` takes: of a GPU nearly all that is free; of a host, which others use too, a quarter and no more than this.
_AUTO_GPU_FRACTION = 0.9
_AUTO_HOST_FRACTION = 0.25
_AUTO_HOST_BYTES = 4 * 2**30


def free_memory(device: torch.device) -> int:
    """Bytes that the device has free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def kv_memory(config: CacheConfig, device: torch.device) -> int:
    """Bytes for the KV cache, as `kv_cache_memory` says."""
    free = free_memory(device)
    if config.kv_cache_memory == "auto":
        if device.type == "cuda":
            return int(free * _AUTO_GPU_FRACTION)
        return min(int(free * _AUTO_HOST_FRACTION), _AUTO_HOST_BYTES)
    amount = parse_memory(config.kv_cache_memory)
    return int(free * amount) if isinstance(amount, float) else amount
