"""RecurrentStateSpec: the KV kind of recurrent states. Needs no torch."""

from __future__ import annotations

import math
from typing import ClassVar

from toolkit_lm.kv import KVCacheSpec


class RecurrentStateSpec(KVCacheSpec, frozen=True, kw_only=True, tag="recurrent_state"):
    """Float32 states of fixed size: one block of max_model_len tokens, which every step writes.

    The block holds a ring of `rewinds` + 1 places. The states after token t are in place t %
    places, so that a step can begin after any of the last tokens. Other sequences begin from
    snapshots.
    """

    caches_prefixes: ClassVar[bool] = False
    forks_anywhere: ClassVar[bool] = False
    grows: ClassVar[bool] = False

    shapes: tuple[tuple[int, ...], ...]
    """Shapes of a layer's states: the last inputs of its convolution, and its recurrence's."""
    every: int = 0
    """Tokens between snapshots within a prompt; 0: one snapshot, before the prompt's last token."""

    @property
    def places(self) -> int:
        """Places of the ring."""
        return self.rewinds + 1

    @property
    def page_bytes(self) -> int:
        return 4 * self.places * sum(math.prod(shape) for shape in self.shapes)

    def stops_at(self, start: int, num_prompt_tokens: int, border: int) -> int:
        last = super().stops_at(start, num_prompt_tokens, border)
        if not last or not self.every:
            return last
        every = max(border, self.every // border * border)
        return min((start // every + 1) * every, last)
