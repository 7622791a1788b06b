"""Filler: reads blocks of the system's page cache straight into the device's memory, in a step.
Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from toolkit_lm.kv import BlockBytes

from toolkit_lm_kv_disk.segments import Place

_ALONE = 2**22
"""Bytes up to which a second thread does not pay."""


class Target(NamedTuple):
    """A block on the device, and its place on disk."""

    place: Place
    block: BlockBytes


class Filler:
    """Halves of many blocks are read by two threads: by the caller's, and by its own."""

    def __init__(self) -> None:
        self._helper = ThreadPoolExecutor(1, "kv_disk fill")

    def fill(self, targets: Sequence[Target]) -> int:
        """Fills blocks. Returns how many of the first have the bytes that were written."""
        if sum(target.place.num_bytes for target in targets) <= _ALONE:
            return _fill(targets)
        half = len(targets) // 2
        rest = self._helper.submit(_fill, targets[half:])
        try:
            filled = _fill(targets[:half])
        finally:
            # Nobody writes to the device's memory beside the step.
            num_rest = rest.result()
        return filled + num_rest if filled == half else filled

    def close(self) -> None:
        self._helper.shutdown()


def _fill(targets: Sequence[Target]) -> int:
    for index, target in enumerate(targets):
        if not target.place.fill(target.block.memory):
            return index
    return len(targets)
