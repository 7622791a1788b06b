"""bad_words: sequences of tokens of which the last is not to be drawn after the others."""

from __future__ import annotations

from collections import defaultdict

import numpy as np


class BadWords:
    """The words of one sequence, found by the token that comes before their last."""

    def __init__(self, words: list[list[int]]) -> None:
        self._longest = max(map(len, words))
        self._always = [word[0] for word in words if len(word) == 1]
        self._after: defaultdict[int, list[list[int]]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._after[word[-2]].append(word)

    def forbidden(self, output: np.ndarray) -> np.ndarray:
        """The tokens that would complete a word after these output tokens [N]."""
        end = output[-self._longest :].tolist()
        words = self._after.get(end[-1], ()) if end else ()
        return np.array([*self._always, *(word[-1] for word in words if end[1 - len(word) :] == word[:-1])], np.int64)
