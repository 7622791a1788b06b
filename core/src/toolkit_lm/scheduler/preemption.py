"""What becomes of a request that must give way: computed again, or swapped to the host and back."""

from __future__ import annotations

from typing import Literal

from toolkit_lm.kv import KVCacheConfig

_BANDWIDTH = 4e9
"""Bytes per second between device and host pools, each way: a low guess, so that recomputing what
is cheap wins."""


class PreemptionCost:
    """Chooses by the option `preemption_mode`; "auto": by cost, from what computing a token has
    cost so far."""

    def __init__(self, mode: Literal["auto", "recompute", "swap"], kv_cache: KVCacheConfig) -> None:
        self.mode = mode if any(pool.num_host_blocks for pool in kv_cache.pools) else "recompute"
        self._seconds_per_token: float | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step took so long. The cheapest seen counts: prefill, which is what recomputing is,
        makes full use of the device."""
        if num_tokens:
            each = seconds / num_tokens
            self._seconds_per_token = (
                each if self._seconds_per_token is None else min(self._seconds_per_token, each)
            )

    def prefers_swap(self, num_tokens: int, num_bytes: int) -> bool:
        """For a request with so many computed tokens, whose own blocks hold so many bytes."""
        if self.mode != "auto":
            return self.mode == "swap"
        swap = 2 * num_bytes / _BANDWIDTH
        return self._seconds_per_token is not None and swap < num_tokens * self._seconds_per_token
