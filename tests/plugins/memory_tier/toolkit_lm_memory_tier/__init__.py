"""A KV tier that keeps what the device gives up in a dictionary."""

from msgspec import Struct
from toolkit_lm.plugin import KVTierRegistry, hookimpl


class Options(Struct, frozen=True):
    """Options of the plugin."""

    capacity: int = 1000
    """Blocks that it keeps, of all KV groups together."""


@hookimpl
def toolkit_register_kv_tiers(kv_tiers: KVTierRegistry) -> None:
    kv_tiers.add(
        "memory",
        "toolkit_lm_memory_tier.store:MemoryStore",
        scheduler="toolkit_lm_memory_tier.tier:MemoryTier",
    )
