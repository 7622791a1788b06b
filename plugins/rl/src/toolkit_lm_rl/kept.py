"""Contents of memory that is given up for a while, in a file. Waking up copies them back: nothing
of the checkpoint is converted or rearranged again, and nothing is in memory twice."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

logger = logging.getLogger(__name__)

_PIECE = 8 << 20
"""Bytes that are copied at once."""
_COMPARED = 256 << 10
"""Bytes that are compared at once. The C library keeps the memory of greater pieces, for each
thread."""
_MOST_THREADS = 8
"""Most threads that copy."""
_ROOM = 0.5
"""Share of a disk's free space that a file may take."""
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")
"""File systems whose files take memory."""
_MOUNTS = Path("/proc/self/mountinfo")

Ranges = Sequence[tuple[int, int]]
"""Addresses: start, end."""


class Kept:
    """Contents of ranges of memory, in a file without a name: it ends with the process."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._ranges: Ranges = []

    def keep(self, ranges: Ranges) -> bool:
        """Writes the contents. What the file has of an earlier time is not written again. Returns
        whether they are kept: there may be no room."""
        size = sum(end - start for start, end in ranges)
        try:
            if self._file is None or self._ranges != ranges:
                self.forget()
                self._file = _room_for(size)
                self._each(ranges, self._write)
            else:
                self._each(ranges, self._change)
        except OSError as error:
            logger.warning("%d bytes of weights are not kept in a file: %s", size, error)
            self.forget()
            return False
        self._ranges = ranges
        return True

    def restore(self) -> bool:
        """Copies the contents back. Returns whether they were kept."""
        if self._file is None:
            return False
        try:
            self._each(self._ranges, self._read)
        except OSError as error:
            logger.warning("the weights cannot be read from their file: %s", error)
            self.forget()
            return False
        return True

    def forget(self) -> None:
        """Closes the file: the contents are others now."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None
        self._ranges = []

    def _each(self, ranges: Ranges, copy: Any) -> None:
        num_threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        with ThreadPoolExecutor(num_threads) as threads:
            for _ in threads.map(lambda piece: copy(*piece), _pieces(ranges)):
                pass

    @property
    def _descriptor(self) -> int:
        assert self._file is not None, "it is open"
        return self._file.fileno()

    def _write(self, memory: memoryview, place: int) -> None:
        done = 0
        while done < len(memory):
            done += os.pwrite(self._descriptor, memory[done:], place + done)

    def _change(self, memory: memoryview, place: int) -> None:
        """Writes what differs from the file."""
        found = memoryview(bytearray(min(len(memory), _COMPARED)))
        for start in range(0, len(memory), _COMPARED):
            piece = memory[start : start + _COMPARED]
            before = found[: len(piece)]
            self._read(before, place + start)
            if not np.array_equal(np.frombuffer(before, np.uint8), np.frombuffer(piece, np.uint8)):
                self._write(piece, place + start)

    def _read(self, memory: memoryview, place: int) -> None:
        done = 0
        while done < len(memory):
            count = os.preadv(self._descriptor, [memory[done:]], place + done)
            if not count:
                raise OSError(errno.EIO, "the file is too short")
            done += count


def _pieces(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[memoryview, int]]:
    """Memory piece by piece, each with its place in the file."""
    place = 0
    for start, end in ranges:
        for address in range(start, end, _PIECE):
            size = min(_PIECE, end - address)
            piece = (ctypes.c_ubyte * size).from_address(address)
            yield memoryview(piece).cast("B"), place
            place += size


def _room_for(size: int) -> IO[bytes]:
    """A file without a name, in the folder for temporary files that has room for so many bytes and
    is on a disk. Raises OSError where there is none."""
    reasons = []
    for folder in dict.fromkeys((tempfile.gettempdir(), "/var/tmp")):  # nosec B108
        try:
            if (kind := _file_system(folder)) in _IN_MEMORY:
                reasons.append(f"{folder} is in memory ({kind})")
                continue
            status = os.statvfs(folder)
            free = status.f_bavail * status.f_frsize
            if size > _ROOM * free:
                reasons.append(f"{folder} has {free} free bytes, and half of them may be used")
                continue
            return tempfile.TemporaryFile(dir=folder, buffering=0)
        except OSError as error:
            reasons.append(f"{folder}: {error}")
    raise OSError(errno.ENOSPC, "; ".join(reasons))


def _file_system(folder: str) -> str:
    """Kind of the file system that has a folder. "": unknown."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError, IndexError):
        for line in _MOUNTS.read_text().splitlines():
            # ID, parent, device, root, place, options, ..., "-", kind, source.
            mount, _, rest = line.partition(" - ")
            if mount.split()[2] == number:
                return rest.split()[0]
    return ""
