"""What tiers may hold, and of which models. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit_lm.config import VllmConfig, parse_memory
from toolkit_lm.errors import ConfigError
from toolkit_lm.kv import KVCacheConfig


def given_options(config: VllmConfig, name: str) -> dict[str, Any]:
    """Options that were given to a plugin, installed as `name`, or given from code."""
    options = config.plugins.plugin_option
    return {**options.get(name, {}), **options.get(f"toolkit_lm_{name}", {})}


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


def why_off(kv_cache: KVCacheConfig) -> str | None:
    """Reason for which an engine's blocks cannot be kept in a tier; None: they can."""
    if any(group.spec.of_encoder for group in kv_cache.groups):
        return (
            "keys and values of cross attention depend on the encoder's whole input, and are no "
            "prefixes of others"
        )
    if (group := kv_cache.without_prefixes) is not None:
        return f"blocks of the kind {group.spec.kind!r} are no prefixes of others"
    return None


def num_ranks(config: VllmConfig) -> int:
    """Ranks of an engine, each with blocks of its own."""
    parallel = config.parallel
    return parallel.tensor_parallel_size * parallel.pipeline_parallel_size


def share_of_rank(config: VllmConfig, total: int) -> int:
    """Bytes that each rank may hold of `total`."""
    return total // num_ranks(config)


def block_sizes(kv_cache: KVCacheConfig) -> Sequence[int]:
    """Bytes of a block, per KV group."""
    return [len(group.layers) * group.spec.page_bytes for group in kv_cache.groups]
