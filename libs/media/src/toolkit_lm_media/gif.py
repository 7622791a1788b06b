"""Headers of GIF files."""

from __future__ import annotations

from toolkit_lm_media.header import AnimationHeader, Header, unpack
from toolkit_lm_media.refusal import RefusedError

MAGICS = (b"GIF87a", b"GIF89a")
_MOST_BLOCKS = 2**14
"""Before the first frame."""
_MOST_BLOCKS_OF_ALL = 2**18
"""Most blocks of an animation. Blocks of pixels usually have 255 bytes."""
_MOST_FRAMES = 2**14
_EXTENSION = 0x21
_FRAME = 0x2C
_END = 0x3B
_CONTROL = 0xF9


def read(data: bytes) -> Header:
    """Header of a still picture. Its size covers the screen and the first frame. The body leaves
    out comments: the decoder joins their blocks in quadratic time.

    Raises RefusedError if there is no frame, or if too many blocks come before it."""
    width, height, flags = unpack("<HHB", data, 6)
    start = 13 + _table_size(flags)
    frame, control = _first_frame(data, start)
    left, top, across, down = unpack("<HHHH", data, frame + 1)
    return Header(
        "GIF",
        max(width, left + across),
        max(height, top + down),
        data[:start] + control + data[frame:],
    )


def read_animation(data: bytes) -> AnimationHeader:
    """Header of all frames. The body has only the frames and their display settings.

    Raises RefusedError if there is no frame, if there are too many frames or blocks, or if one lies
    outside the first one's canvas."""
    width, height, flags = unpack("<HHB", data, 6)
    start = offset = 13 + _table_size(flags)
    left = _MOST_BLOCKS_OF_ALL
    control = b""
    kept = [data[:start]]
    sizes = [(width, height)]
    durations = list[int]()
    while offset < len(data) and data[offset] != _END:
        head = 2 if data[offset] == _EXTENSION else _frame_head(data, offset)
        end, left = _end_of_blocks(data, offset + head, left - 1)
        if left <= 0:
            raise RefusedError("it is a GIF of too many blocks")
        if head > 2:
            across, down = (
                sum(pair)
                for pair in zip(
                    *(unpack("<HH", data, offset + place) for place in (1, 5)), strict=True
                )
            )
            sizes.append((max(width, across), max(height, down)))
            kept += [control, data[offset:end]]
            durations.append(10 * unpack("<H", control, 4)[0] if control else 0)
            control = b""
        elif data[offset + 1] == _CONTROL:
            control = data[offset:end]
        offset = end
        if len(durations) > _MOST_FRAMES:
            raise RefusedError(f"it has more than {_MOST_FRAMES} frames")
    if not durations:
        raise RefusedError("it is a GIF without frames")
    if len(set(sizes[1:])) > 1 and sizes[1] != (max(w for w, _ in sizes), max(h for _, h in sizes)):
        raise RefusedError("it is a GIF with two sizes")
    return AnimationHeader("GIF", *sizes[1], b"".join([*kept, bytes([_END])]), durations)


def _frame_head(data: bytes, offset: int) -> int:
    """Bytes of a frame before its blocks: where it stands, its colour table, and how its pixels are
    packed."""
    if data[offset] != _FRAME:
        raise RefusedError("it is a broken GIF")
    (flags,) = unpack("<B", data, offset + 9)
    return 11 + _table_size(flags)


def _table_size(flags: int) -> int:
    """Bytes of the colour table."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _first_frame(data: bytes, offset: int) -> tuple[int, bytes]:
    """The offset of the first frame, and the control extension that goes with it."""
    control = b""
    left = _MOST_BLOCKS
    while left > 0:
        (kind,) = unpack("<B", data, offset)
        if kind == _FRAME:
            return offset, control
        if kind != _EXTENSION:
            raise RefusedError("it is a broken GIF")
        (label,) = unpack("<B", data, offset + 1)
        end, left = _end_of_blocks(data, offset + 2, left - 1)
        if label == _CONTROL:
            control = data[offset:end]
        offset = end
    raise RefusedError("it is a GIF of too many blocks before its first frame")


def _end_of_blocks(data: bytes, offset: int, left: int) -> tuple[int, int]:
    """The offset after the blocks of an extension, and how many more may come."""
    while left > 0:
        (length,) = unpack("<B", data, offset)
        offset, left = offset + 1 + length, left - 1
        if not length:
            break
    return offset, left
