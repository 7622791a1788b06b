"""Frames: values in the store, each a header with a checksum, and a block's bytes. Needs no torch.

The checksum covers the key too: a block under another's key is a miss.
"""

from __future__ import annotations

import struct
from zlib import crc32

from toolkit_lm_kv_redis.link import VERSION

_MAGIC = b"TLKV"
_HEAD = struct.Struct("<4sIQI")
"""Magic, version, bytes of the block, and the CRC-32 of the key, of these, and of the block."""
FRAME_BYTES = _HEAD.size
"""Bytes of a value beside those of the block."""


class FrameError(Exception):
    """A value is not as it was written. The text says how."""


def pack(key: str, data: bytes | bytearray) -> bytes:
    """The value of a block."""
    head = struct.pack("<4sIQ", _MAGIC, VERSION, len(data))
    return b"".join((head, _checksum(key, head, data).to_bytes(4, "little"), data))


def unpack(key: str, value: object) -> memoryview:
    """The block's bytes. Raises KeyError for no value, and FrameError."""
    if not isinstance(value, bytes | bytearray):
        raise FrameError(f"a {type(value).__name__} in the place of a block")
    if not value:
        raise KeyError("the block is not in the store any more")
    if len(value) < FRAME_BYTES or value[:4] != _MAGIC:
        raise FrameError("a value is no block")
    _, version, num_bytes, checksum = _HEAD.unpack_from(value)
    if version != VERSION:
        raise FrameError(f"a block has version {version}, and {VERSION} is read")
    data = memoryview(value)[FRAME_BYTES:]
    if len(data) != num_bytes or _checksum(key, value[: FRAME_BYTES - 4], data) != checksum:
        raise FrameError("a block is damaged")
    return data


def _checksum(key: str, head: bytes | bytearray, data: bytes | bytearray | memoryview) -> int:
    return crc32(data, crc32(head, crc32(key.encode())))
