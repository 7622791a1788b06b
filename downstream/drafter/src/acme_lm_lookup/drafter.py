"""Prompt lookup: the longest end of a sequence that it has had before goes on as it did there."""

import numpy as np
from toolkit_lm.step import Drafter

LONGEST_MATCH = 4
MOST_DRAFTS = 5


class LookupDrafter(Drafter):
    """Drafts what followed the longest match, at its latest place."""

    def propose(self, token_ids: np.ndarray) -> list[int]:
        return look_up(token_ids)


def look_up(token_ids: np.ndarray) -> list[int]:
    """Drafts for a sequence of `token_ids` [N] int32; none where its last token is new to it."""
    for length in range(min(LONGEST_MATCH, len(token_ids) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(token_ids[:-1], length)
        places = np.flatnonzero((windows == token_ids[-length:]).all(axis=1))
        if len(places):
            start = int(places[-1]) + length
            drafts: list[int] = token_ids[start : start + MOST_DRAFTS].tolist()
            return drafts
    return []
