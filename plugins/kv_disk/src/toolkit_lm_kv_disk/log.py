"""SegmentLog: the blocks of one rank on disk, within a budget of bytes. Needs no torch."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from toolkit_lm_kv_disk.segments import (
    RECORD_BYTES,
    DamageError,
    Key,
    Place,
    Segment,
    number_of,
    path_of,
    read_all,
)

logger = logging.getLogger(__name__)

_SEGMENTS = 16
"""Number of segments that the budget is divided into."""
_MOST_SEGMENT = 2**28
"""Most bytes of a segment, but for its last record."""
_FULL = 0.95
"""Share of a segment's bytes that are found, from which on moving them frees too little."""


class SegmentLog:
    """Blocks are appended to the newest segment. Where room is short, the segment with the least
    share of blocks that are still found is written anew, at the end, and deleted.

    `index` may be read by any thread. All else is called by one thread.
    """

    def __init__(
        self, folder: Path, identity: bytes, budget: int, sizes: Mapping[int, int], *, writes: bool
    ) -> None:
        """`sizes`: bytes of a stored block, by KV group; others are not found. `writes`: nobody
        else writes to this folder. Raises OSError if the folder cannot be made."""
        self._folder = folder
        self._identity = identity
        self._lock = threading.Lock()
        self._segment_bytes = min(budget // _SEGMENTS, _MOST_SEGMENT)
        self._limit = budget - self._segment_bytes
        """Bytes from which on segments are written anew; that takes up to a segment more."""
        self._current: Segment | None = None
        segments, places, damages = read_all(folder, identity)
        self._segments = segments
        self.index = {
            key: place for key, place in places.items() if sizes.get(key[0]) == place.num_bytes
        }
        for place in self.index.values():
            place.segment.live += _record_bytes(place)
        if damages:
            logger.warning(
                "%s: %d segments are damaged or foreign, and what they held is computed again: %s",
                folder,
                len(damages),
                "; ".join(damages[:3]),
            )
        self._number = max((segment.number for segment in segments), default=0)
        with contextlib.suppress(OSError):
            # One that cannot be opened has a number, too.
            self._number = max([self._number, *map(number_of, folder.iterdir())])
        if writes:
            for segment in [segment for segment in segments if not segment.live]:
                self._delete(segment)

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self._segments)

    def append(self, key: Key, data: bytes | bytearray) -> bool:
        """Writes a block. Returns whether there was room. Raises OSError."""
        needed = len(data) + RECORD_BYTES
        # Each segment is written anew once at most.
        for _ in range(2 * len(self._segments) + 1):
            if self.num_bytes + needed <= self._limit:
                break
            if not self._compact():
                return False
        else:
            return False
        self._set(key, self._newest().append(key, data))
        return True

    def drop(self, key: Key) -> None:
        """Forgets a block. Raises OSError."""
        with self._lock:
            place = self.index.pop(key, None)
        if place is None:
            return
        place.segment.live -= _record_bytes(place)
        if place.segment.live == 0:
            self._delete(place.segment)
        else:
            self._newest().append_dropped(key)

    def _set(self, key: Key, place: Place) -> None:
        with self._lock:
            before = self.index.get(key)
            self.index[key] = place
        place.segment.live += _record_bytes(place)
        if before is not None:
            before.segment.live -= _record_bytes(before)

    def _newest(self) -> Segment:
        """The segment that is appended to."""
        if self._current is None or self._current.size >= self._segment_bytes:
            self._number += 1
            path = path_of(self._folder, self._number)
            self._current = Segment.create(path, self._identity)
            self._segments.append(self._current)
        return self._current

    def _compact(self) -> bool:
        """Writes what is found of a segment anew, and deletes it. Returns whether that can free
        anything."""
        segments = [s for s in self._segments if s is not self._current]
        segment = min(segments, key=lambda s: s.share, default=None)
        if segment is None or segment.share > _FULL:
            if self._current is None or self._current.share > _FULL:
                return False
            self._current = None
            return True
        kept = [(key, place) for key, place in self.index.items() if place.segment is segment]
        for key, place in kept:
            try:
                data = segment.read(place)
            except DamageError:
                with self._lock:
                    del self.index[key]
                continue
            self._set(key, self._newest().append(key, data))
        self._delete(segment)
        return True

    def _delete(self, segment: Segment) -> None:
        """Deletes a segment's file. Reads that have begun go on."""
        if segment is self._current:
            self._current = None
        self._segments.remove(segment)
        with contextlib.suppress(OSError):
            segment.path.unlink()


def _record_bytes(place: Place) -> int:
    return place.num_bytes + RECORD_BYTES
