"""Finds stop texts in a growing text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopTexts:
    """The stop texts of a request, as automata of Knuth, Morris and Pratt (1977), which its
    sequences share.

    Their tables grow only as far as a text has matched. A stop text that never occurs costs no
    table.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._borders = [array("I") for _ in stops]
        """Per stop text and prefix, the length of its longest proper prefix that is also its
        suffix."""

    def advance(self, number: int, matched: int, character: str) -> tuple[int, bool]:
        """Returns the number of matched characters of a stop text after this character, of which
        `matched` were matched before it; and whether the stop text ends here."""
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
    """Follows a text character by character, in constant time for each, however long the stop
    texts."""

    def __init__(self, texts: StopTexts) -> None:
        self._texts = texts
        self._matched = array("I", bytes(4 * len(texts.stops)))

    @property
    def num_held_back(self) -> int:
        """Number of characters at the text's end that begin a stop text."""
        return max(self._matched, default=0)

    def forget(self) -> None:
        """Resets the matches: the next text continues no earlier one."""
        self._matched = array("I", bytes(4 * len(self._matched)))

    def find(self, text: str) -> tuple[int, str] | None:
        """Finds the first stop text that ends in `text`, the next part. Returns the position and
        the stop text; if several end there, the longest."""
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
