"""Forbidden tokens: the last ones of forbidden sequences, and those that complete a forbidden
text."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from toolkit_lm.messages import ForbiddenTexts


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
        return np.array(
            [*self._always, *(word[-1] for word in words if end[1 - len(word) :] == word[:-1])],
            np.int64,
        )


class ForbiddenTextRules:
    """The forbidden texts of one request, whichever tokens spell them."""

    def __init__(self, texts: ForbiddenTexts) -> None:
        self._steps = texts.steps.to_numpy()
        self._ends = texts.ends.to_numpy()
        self._tokens, self._end_states = (
            np.ascontiguousarray(table[:, 0]) for table in (self._steps, self._ends)
        )
        self._silent = np.unpackbits(texts.silent.to_numpy()).view(bool)
        self._longest = texts.longest

    def forbidden(self, output: np.ndarray) -> np.ndarray:
        """The tokens that would complete a text after these output tokens [N]."""
        read = self._last_with_text(output, self._longest - 1)
        starts, ends = (
            np.searchsorted(self._tokens, read, side).tolist() for side in ("left", "right")
        )
        active: set[int] = set()
        for start, end in zip(starts, ends, strict=True):
            steps = self._steps[start:end, 1:].tolist()
            active = {after for state, after in steps if state == 0 or state in active}
        bounds = [np.searchsorted(self._end_states, [state, state + 1]) for state in (0, *active)]
        return np.concatenate([self._ends[start:end, 1] for start, end in bounds]).astype(np.int64)

    def _last_with_text(self, output: np.ndarray, count: int) -> np.ndarray:
        """So many tokens, or all there are. Of the output no more is read than has them."""
        # A text has no more tokens than bytes; those without any stand between them.
        length = 2 * count
        found = output[:0]
        while len(found) < count:
            tail = output[-length:]
            found = tail[~self._silent.take(tail, mode="clip")][-count:]
            if len(tail) == len(output):
                break
            length *= 2
        return found
