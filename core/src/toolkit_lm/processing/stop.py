"""Finds stop texts in a text that grows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopTexts:
    """The stop texts of a request, as automata of Knuth, Morris and Pratt (1977), which its
    sequences share.

    Their tables grow as far as a text has matched: a stop text that never comes costs nothing but
    itself.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._borders = [array("I") for _ in stops]
        """Per stop text and prefix, the length of its longest proper prefix that is also its
        suffix."""

    def advance(self, number: int, matched: int, character: str) -> tuple[int, bool]:
        """How much of a stop text matches after this character, of which `matched` characters did;
        and whether it ends there."""
        stop = self.stops[number]
        while matched and stop[matched] != character:
            matched = self._border(number, matched)
        matched += stop[matched] == character
        ended = matched == len(stop)
        return self._border(number, matched) if ended else matched, ended

    def _border(self, number: int, length: int) -> int:
        stop = self.stops[number]
        borders = self._borders[number]
        for i in range(len(borders), length):
            border = borders[i - 1] if i else 0
            while border and stop[i] != stop[border]:
                border = borders[border - 1]
            borders.append(border + (i > 0 and stop[i] == stop[border]))
        return borders[length - 1]


class StopFinder:
    """Follows a text character by character: constant time for each, however long the stop
    texts."""

    def __init__(self, texts: StopTexts) -> None:
        self._texts = texts
        self._matched = array("I", bytes(4 * len(texts.stops)))

    @property
    def num_held_back(self) -> int:
        """Characters at the text's end that are the beginning of a stop text."""
        return max(self._matched, default=0)

    def forget(self) -> None:
        """What comes next goes on with nothing that came before."""
        self._matched = array("I", bytes(4 * len(self._matched)))

    def find(self, text: str) -> tuple[int, str] | None:
        """Where in `text`, the next part, the first stop text ends, and which it is; the longest,
        where several end there."""
        stops = self._texts.stops
        matched = self._matched
        for position, character in enumerate(text):
            ended = []
            for number, stop in enumerate(stops):
                if matched[number] or stop[0] == character:
                    matched[number], ends = self._texts.advance(number, matched[number], character)
                    if ends:
                        ended.append(stop)
            if ended:
                return position + 1, max(ended, key=len)
        return None
