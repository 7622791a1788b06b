"""Segments: files to which blocks are appended. Needs no torch.

A segment begins with a header: the format's version and the identity of its blocks. Records follow,
each a header of its own with a checksum, and the block's bytes. A segment is written once, by the
process that made it. Whatever is not as it was written counts as not there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from toolkit_lm.kv import Data
from xxhash import xxh3_64

Key = tuple[int, bytes]
"""KV group and digest of a block."""

_MAGIC = b"TLMKVSEG"
VERSION = 2
_FILE = struct.Struct("<8sI32sI")
"""Magic, version, identity, and the CRC-32 of these."""
_RECORD = struct.Struct("<4sHH32sQII")
"""Magic, kind, group, digest, bytes of the block, their XXH3, and the CRC-32 of all these."""
_RECORD_MAGIC = b"TKVB"
_BLOCK = 1
_DROPPED = 2
"""Kinds of records: a block, and a block that is not found any more, whichever segment holds it."""
_NAME = re.compile(r"segment-(\d{8})\.kv")
RECORD_BYTES = _RECORD.size
"""Bytes of a record beside those of its block."""


def checksum_of(parts: Sequence[Data]) -> int:
    """The lower 32 bits of the XXH3-64 of parts that follow one another."""
    digest = xxh3_64()
    for part in parts:
        digest.update(part)
    return int(digest.intdigest()) & 0xFFFF_FFFF


class DamageError(Exception):
    """A segment, or the rest of it, is not as it was written. The text says how."""


class Place(NamedTuple):
    """Place of a block."""

    segment: Segment
    offset: int
    """Of its bytes."""
    num_bytes: int
    checksum: int
    """As `checksum_of` computes it."""

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    def check(self, data: Data) -> None:
        """Raises DamageError for other bytes than were written."""
        if len(data) != self.num_bytes:
            raise DamageError(f"{self.segment.path.name} was cut")
        if checksum_of([data]) != self.checksum:
            raise DamageError(f"{self.segment.path.name}: a block is damaged")

    def fill(self, memory: Sequence[Data]) -> bool:
        """Reads the bytes into this memory, without a wait for the disk. Returns whether they were
        at hand and are those that were written."""
        try:
            if os.preadv(self.segment.fd, memory, self.offset, os.RWF_NOWAIT) != self.num_bytes:
                return False
        except OSError:
            # The page cache lacks the first ones, or the file system cannot tell.
            return False
        return checksum_of(memory) == self.checksum


class Segment:
    """A file of records, open as long as something refers to it."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path = path
        self.fd = fd
        self.size = size
        self.live = 0
        """Bytes of records that are found."""

    def __del__(self) -> None:
        os.close(self.fd)

    @property
    def number(self) -> int:
        return number_of(self.path)

    @property
    def share(self) -> float:
        """Share of the bytes of records that are found."""
        return self.live / max(self.size - _FILE.size, 1)

    @classmethod
    def open(cls, path: Path) -> Segment:
        """Raises OSError, also for a folder, a pipe or a link."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        found = cls(path, fd, os.fstat(fd).st_size)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        return found

    @classmethod
    def create(cls, path: Path, identity: bytes) -> Segment:
        """Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        segment = cls(path, os.open(path, flags, 0o600), 0)
        head = struct.pack("<8sI32s", _MAGIC, VERSION, identity)
        segment._append(head + crc32(head).to_bytes(4, "little"))
        return segment

    def append(self, key: Key, data: bytes | bytearray) -> Place:
        """Writes a block at the end. Raises OSError, and the segment is then as before."""
        checksum = checksum_of([data])
        self._append(_record(_BLOCK, key, len(data), checksum) + data)
        return Place(self, self.size - len(data), len(data), checksum)

    def append_dropped(self, key: Key) -> None:
        """Writes that a block is not there any more. Raises OSError."""
        self._append(_record(_DROPPED, key, 0, 0))

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.pwrite(self.fd, view, self.size + len(data) - len(view)) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, self.size)
            raise
        self.size += len(data)

    def read(self, place: Place) -> bytearray:
        """Bytes of a block. Raises OSError, and DamageError for other bytes than were written."""
        data = bytearray(place.num_bytes)
        place.check(memoryview(data)[: self.read_into(memoryview(data), place.offset)])
        return data

    def read_into(self, target: memoryview, offset: int) -> int:
        """Reads bytes from this place on. Returns how many there were. Raises OSError."""
        left = target
        while left and (count := os.preadv(self.fd, [left], offset + len(target) - len(left))):
            left = left[count:]
        return len(target) - len(left)

    def scan(self, identity: bytes) -> Iterator[tuple[Key, Place | None]]:
        """Yields each record's key and place in the order of writing; None: the block was dropped.
        Raises OSError, and DamageError where the rest cannot be read."""
        head = os.pread(self.fd, _FILE.size, 0)
        if len(head) < _FILE.size or not head.startswith(_MAGIC):
            raise DamageError(f"{self.path.name} is no segment")
        _, version, own, checksum = _FILE.unpack(head)
        if version != VERSION:
            raise DamageError(f"{self.path.name} has version {version}, and {VERSION} is read")
        if crc32(head[:-4]) != checksum:
            raise DamageError(f"{self.path.name}: its header is damaged")
        if own != identity:
            raise DamageError(f"{self.path.name} is of other weights or options")
        offset = _FILE.size
        while offset < self.size:
            head = os.pread(self.fd, _RECORD.size, offset)
            if len(head) < _RECORD.size:
                raise DamageError(f"{self.path.name} was cut")
            magic, kind, group, digest, num_bytes, data_checksum, checksum = _RECORD.unpack(head)
            if crc32(head[:-4]) != checksum or magic != _RECORD_MAGIC:
                raise DamageError(f"{self.path.name}: a record is damaged")
            offset += _RECORD.size
            if kind == _DROPPED:
                yield (group, digest), None
            elif offset + num_bytes > self.size:
                raise DamageError(f"{self.path.name} was cut")
            elif kind == _BLOCK:
                yield (group, digest), Place(self, offset, num_bytes, data_checksum)
            offset += num_bytes


def _record(kind: int, key: Key, num_bytes: int, checksum: int) -> bytes:
    group, digest = key
    if len(digest) != 32:
        raise ValueError(f"a digest of {len(digest)} bytes, and not of 32")
    head = struct.pack("<4sHH32sQI", _RECORD_MAGIC, kind, group, digest, num_bytes, checksum)
    return head + crc32(head).to_bytes(4, "little")


def number_of(path: Path) -> int:
    """Number of a segment's file; -1 for another file."""
    found = _NAME.fullmatch(path.name)
    return -1 if found is None else int(found[1])


def path_of(folder: Path, number: int) -> Path:
    """A segment's file."""
    return folder / f"segment-{number:08d}.kv"


def read_all(folder: Path, identity: bytes) -> tuple[list[Segment], dict[Key, Place], list[str]]:
    """The segments of a folder, the places of their blocks in the order of writing, and what was
    found damaged. No folder counts as an empty one."""
    try:
        paths = sorted(path for path in folder.iterdir() if number_of(path) >= 0)
    except OSError:
        return [], {}, []
    segments: list[Segment] = []
    places: dict[Key, Place] = {}
    damages = []
    for path in paths:
        try:
            segment = Segment.open(path)
        except OSError as error:
            damages.append(f"{path.name}: {error.strerror}")
            continue
        segments.append(segment)
        try:
            for key, place in segment.scan(identity):
                places.pop(key, None)
                if place is not None:
                    places[key] = place
        except (DamageError, OSError) as error:
            damages.append(str(error))
    return segments, places, damages
