"""PagedBackend: base of attention backends whose pages hold keys before values, and what they
share. A library for attention backends: it registers nothing."""

from toolkit_lm_paged_attention.backend import PagedBackend, PagedStep, Store
from toolkit_lm_paged_attention.fused import fused_attention
from toolkit_lm_paged_attention.gpu import gpu_refusal
from toolkit_lm_paged_attention.offsets import OffsetTables
from toolkit_lm_paged_attention.places import halves, key_places, keys_and_values, places_of_keys

__all__ = [
    "OffsetTables",
    "PagedBackend",
    "PagedStep",
    "Store",
    "fused_attention",
    "gpu_refusal",
    "halves",
    "key_places",
    "keys_and_values",
    "places_of_keys",
]
