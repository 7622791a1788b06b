"""Choice between the two ways to preempt a request: recompute it, or swap it to the host and
back."""

from __future__ import annotations

from typing import Literal

from toolkit_lm.kv import KVCacheConfig

_BANDWIDTH = 4e9
"""Bytes per second between device and host pools, each way. A low guess, so that cheap
recomputation wins."""


class PreemptionCost:
    """Chooses by the option `preemption_mode`. "auto" compares costs, from the time that computing
    a token has taken so far."""

    def __init__(self, mode: Literal["auto", "recompute", "swap"], kv_cache: KVCacheConfig) -> None:
        self.mode = mode if any(pool.num_host_blocks for pool in kv_cache.pools) else "recompute"
        self._seconds_per_token: float | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Records the duration of a step. The cheapest step so far counts: recomputing is a
        prefill, which makes full use of the device."""
        if num_tokens:
            each = seconds / num_tokens
            self._seconds_per_token = (
                each if self._seconds_per_token is None else min(self._seconds_per_token, each)
            )

    def seconds(self, num_tokens: int) -> float | None:
        """About how long computing so many tokens takes; None: no step has ended yet."""
        each = self._seconds_per_token
        return None if each is None else each * num_tokens

    def prefers_swap(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether to swap a request with this many computed tokens and this many bytes in its own
        blocks."""
        if self.mode != "auto":
            return self.mode == "swap"
        swap = 2 * num_bytes / _BANDWIDTH
        return swap < (self.seconds(num_tokens) or 0.0)
