"""Finds stop texts in a text that grows."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Follows a text character by character, and knows how much of each stop text its end could be the beginning of.

    Knuth, Morris and Pratt's automaton (1977), one per stop text: constant time per character, however long the stop texts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)

    @property
    def num_held_back(self) -> int:
        """Characters at the text's end that are the beginning of a stop text."""
        return max(self._matched, default=0)

    def find(self, text: str) -> tuple[int, str] | None:
        """Where in `text`, the next part, the first stop text ends, and which it is; the longest, where several end there."""
        for position, character in enumerate(text):
            ended = [stop for number, (stop, _) in enumerate(self._stops) if self._advance(number, character)]
            if ended:
                return position + 1, max(ended, key=len)
        return None

    def _advance(self, number: int, character: str) -> bool:
        stop, borders = self._stops[number]
        matched = self._matched[number]
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
        ended = matched == len(stop)
        self._matched[number] = borders[matched - 1] if ended else matched
        return ended


def _borders(stop: str) -> list[int]:
    """Per prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    for i in range(1, len(stop)):
        length = borders[i - 1]
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        borders[i] = length + (stop[i] == stop[length])
    return borders
