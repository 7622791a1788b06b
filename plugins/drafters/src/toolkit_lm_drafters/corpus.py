"""Text that drafts are copied from: one sequence that grows, or the outputs of many requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from toolkit_lm_drafters.token_index import TokenIndex, common_suffix

_CANDIDATES = 24
"""Most earlier occurrences of a gram that are compared."""
_VOTES = 8
"""Most earlier occurrences that predict the next tokens."""
END = -1
"""Separator of outputs, outside the vocabulary."""


class Guess(NamedTuple):
    """Drafts, and the probability of each if those before it are right."""

    tokens: list[int]
    probabilities: list[float]

    @property
    def score(self) -> float:
        """Expected number of right drafts."""
        total = 0.0
        product = 1.0
        for probability in self.probabilities:
            product *= probability
            total += product
        return total


NO_GUESS = Guess([], [])


class Limits(NamedTuple):
    """Limits of a guess."""

    num_tokens: int
    """Most tokens."""
    depth: int
    """Most tokens of a match."""
    factor: float
    """Most tokens of a guess per token of its match."""
    min_probability: float
    """Least probability of a guess as a whole."""


class Corpus:
    """Tokens with indexes of their grams: a suffix structure of bounded depth. Longer grams are
    looked up first, since matches of them are fewer and better."""

    def __init__(self, sizes: Sequence[int], capacity: int = 0) -> None:
        """`sizes`: tokens of a gram, of each index. `capacity`: number of tokens to make room
        for."""
        self._indexes = [TokenIndex(size, capacity) for size in sorted(sizes, reverse=True)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the indexes."""
        return sum(index.num_bytes for index in self._indexes)

    def update(self, tokens: np.ndarray) -> None:
        """Adds the tokens after those of earlier calls. `tokens` [N] int32: all."""
        for index in self._indexes:
            index.update(tokens)

    def guess(self, held: memoryview, num_held: int, known: memoryview, limits: Limits) -> Guess:
        """Guesses at the tokens after `known`, by what followed its last tokens in held[:num_held],
        which are this corpus's tokens."""
        end = len(known)
        for index in self._indexes:
            found = [
                (common_suffix(known, end, held, place, limits.depth), place)
                for place in index.occurrences(known, end, _CANDIDATES, held)
                if place < num_held
            ]
            if found:
                longest = max(found)[0]
                places = [place for length, place in found if length == longest][:_VOTES]
                return _vote(held, num_held, places, longest, limits)
        return NO_GUESS


def _vote(held: memoryview, num_held: int, places: list[int], match: int, limits: Limits) -> Guess:
    """Follows the most frequent continuation, as in a suffix tree."""
    tokens: list[int] = []
    probabilities: list[float] = []
    product = 1.0
    # The latest place comes first, and its tokens end first.
    places = places[::-1]
    for ahead in range(min(limits.num_tokens, max(1, int(match * limits.factor)))):
        followers = [held[place + ahead] for place in places if place + ahead < num_held]
        if not followers:
            break
        best = max(followers, key=followers.count)
        share = followers.count(best) / len(followers)
        product *= share
        if best == END or product < limits.min_probability:
            break
        tokens.append(best)
        probabilities.append(share * (1 - 1 / (match + ahead + 2)))
        if share < 1 or len(followers) < len(places):
            places = [
                place for place, token in zip(places, followers, strict=False) if token == best
            ]
    return Guess(tokens, probabilities)
