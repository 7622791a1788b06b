"""Prompt lookup: what it drafts, and that drafts change no token."""

from __future__ import annotations

import numpy as np
import pytest
from acme_lm_lookup.drafter import look_up
from toolkit_lm_devkit import DrafterConformance


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([5], []),
        ([1, 2, 3], []),
        # The longest match goes first: after 7 8 came 9, after the later 8 came 4.
        ([7, 8, 9, 8, 4, 7, 8], [9, 8, 4, 7, 8]),
        # The latest of two matches of equal length.
        ([8, 1, 8, 2, 8], [2, 8]),
        ([6, 6, 6], [6]),
    ],
    ids=str,
)
def test_it_drafts_what_followed(tokens, drafts):
    assert look_up(np.array(tokens, dtype=np.int32)) == drafts


class TestLookup(DrafterConformance):
    drafter = "lookup"
