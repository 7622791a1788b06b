"""Target of the entry module."""

import numpy as np
from toolkit_lm.step import Drafter

LONGEST = 3
"""Tokens of an n-gram."""
MOST_DRAFTS = 4


class NgramDrafter(Drafter):
    """Prompt lookup: finds the last tokens, the longest n-gram first, at their latest place before,
    and drafts what came after them."""

    def propose(self, token_ids: np.ndarray) -> list[int]:
        for size in range(min(LONGEST, len(token_ids) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(token_ids[:-1], size)
            places = np.flatnonzero((windows == token_ids[-size:]).all(axis=1))
            if len(places):
                start = int(places[-1]) + size
                drafts: list[int] = token_ids[start : start + MOST_DRAFTS].tolist()
                return drafts
        return []
