"""bad_words: sequences of tokens of which the last is not to be drawn after the others."""

from __future__ import annotations

import numpy as np

_ANY = -2
_NONE = -1


class BadWords:
    """The words of one sequence, made ready to be compared with the end of its output."""

    def __init__(self, words: list[list[int]]) -> None:
        longest = max(map(len, words)) - 1
        self._last = np.array([word[-1] for word in words], np.int64)
        self._before = np.full((len(words), longest), _ANY, np.int64)
        """[words, longest - 1]: the tokens before the last, at the right."""
        for row, word in zip(self._before, words, strict=True):
            row[longest - len(word) + 1 :] = word[:-1]

    def forbidden(self, output: np.ndarray) -> np.ndarray:
        """The tokens that would complete a word after these output tokens [N]."""
        width = self._before.shape[1]
        end = np.full(width, _NONE, np.int64)
        known = output[len(output) - min(len(output), width) :]
        end[width - len(known) :] = known
        forbidden: np.ndarray = self._last[((self._before == end) | (self._before == _ANY)).all(axis=1)]
        return forbidden
