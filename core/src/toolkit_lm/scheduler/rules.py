"""RequestRules: what an engine sets for all its requests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple


class RequestRules(NamedTuple):
    """Settings that apply to all requests of an engine."""

    salt: str = ""
    """Salt of the block hashes."""
    default_seed: int | None = None
    """Seed of requests without one. None: each gets a random seed."""
    chunked: bool = True
    """Prompts may be computed in several steps."""
    needs_tokens: bool = False
    """A sampled token is computed only once its id is known: only the last stage has it before."""
    forks_anywhere: bool = True
    """Sequences can fork from the leader at any token. If False, the leader stops at the fork."""
    max_drafts: int = sys.maxsize
    """Most drafts of a sequence that one step computes."""
    whole_items: bool = False
    """A step computes all tokens of a multimodal item, or none."""
    next_stop: Callable[[int, int], int] | None = None
    """`Snapshots.next_stop`, where any are kept."""
