"""Measures of JSON before it is parsed: its depth, and the number of its values."""

from __future__ import annotations

import numpy as np

_PART = 2**18
"""Bytes that are measured together."""


def measure(body: bytes) -> tuple[int, int]:
    """The depth of JSON, and the number of its values and names. The result is arbitrary for a body
    that is not JSON."""
    # Without escaped characters, each quotation mark begins or ends a text.
    bare = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    values = 1
    level = 0
    deepest = 0
    quotes = 0
    for start in range(0, len(bare), _PART):
        part = bare[start : start + _PART]
        # Only the last bit counts, so it may overflow.
        inside = np.cumsum(part == ord('"'), dtype=np.uint8) + np.uint8(quotes)
        quotes = int(inside[-1]) & 1
        structure = part[inside & 1 == 0]
        levels = np.cumsum(_STEPS[structure], dtype=np.int32)
        deepest = max(deepest, level + int(levels.max(initial=0)))
        level += int(levels[-1]) if len(levels) else 0
        values += int(np.count_nonzero(_BEGINS[structure]))
    return deepest, values


def _table(**values: str) -> np.ndarray:
    """A table by character: 1 for those of `more`, -1 for those of `less`, else 0."""
    table = np.zeros(256, np.int8)
    for sign, characters in ((1, values["more"]), (-1, values.get("less", ""))):
        table[[ord(character) for character in characters]] = sign
    return table


_STEPS = _table(more="[{", less="]}")
_BEGINS = _table(more="[{,:")
