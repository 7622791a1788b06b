"""Which tiers an engine has, and how many bytes they may hold. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit_lm.config import VllmConfig, parse_memory
from toolkit_lm.errors import ConfigError
from toolkit_lm.kv import KVCacheConfig

NAMES = ("kv_disk", "toolkit_lm_kv_disk")
"""Names of the plugin: installed, and given from code."""


def num_bytes(name: str, text: str | None) -> int:
    """The bytes that an option states; 0 for None. Raises ValueError that names it."""
    if text is None:
        return 0
    try:
        amount = parse_memory(text)
    except ConfigError as error:
        raise ValueError(f"{name}: {error}") from None
    if isinstance(amount, float):
        raise ValueError(f"{name}: {text!r} is a share. State bytes, such as '20GiB'.")
    return amount


def disk_bytes(options: Any) -> int:
    """Most bytes in the folder."""
    return num_bytes("disk", options.disk or "20GiB")


def is_enabled(config: VllmConfig) -> bool:
    """Whether an option of the plugin asks for a tier."""
    options: dict[str, Any] = {}
    for name in NAMES:
        options |= config.plugins.plugin_option.get(name, {})
    return options.get("dir") is not None or options.get("host") is not None


def check_sizes(options: Any) -> None:
    """Raises ValueError for sizes that are none, and for that of no folder."""
    disk_bytes(options)
    num_bytes("host", options.host)
    if options.disk is not None and options.dir is None:
        raise ValueError("disk: it is the size of a folder, and dir names none.")


def check(config: VllmConfig, options: Any) -> None:
    """Raises ConfigError where there are no cached prefixes to keep."""
    has_tier = options.dir is not None or options.host is not None
    if has_tier and config.cache.enable_prefix_caching is False:
        raise ConfigError(
            "kv_disk.dir and kv_disk.host keep cached prefixes, and enable_prefix_caching is False."
        )


def why_off(kv_cache: KVCacheConfig) -> str | None:
    """Reason for which an engine's blocks cannot be kept in a tier; None: they can."""
    if any(group.spec.of_encoder for group in kv_cache.groups):
        return "requests of models with an encoder are not loaded from KV tiers"
    if (group := kv_cache.without_prefixes) is not None:
        return f"blocks of the kind {group.spec.kind!r} are no prefixes of others"
    return None


def share_of_rank(config: VllmConfig, total: int) -> int:
    """Bytes that each rank may hold of `total`."""
    parallel = config.parallel
    return total // (parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


def block_sizes(kv_cache: KVCacheConfig) -> Sequence[int]:
    """Bytes of a block, per KV group."""
    return [len(group.layers) * group.spec.page_bytes for group in kv_cache.groups]
