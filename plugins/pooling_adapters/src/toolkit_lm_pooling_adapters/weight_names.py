"""Reads the names of a checkpoint's weights from the headers of its safetensors files, without
torch."""

from __future__ import annotations

import json
from pathlib import Path

from toolkit_lm.errors import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8


def stored_weights(folder: str | Path) -> frozenset[str]:
    """Names of the weights in a checkpoint folder; empty without a safetensors file. Raises
    CheckpointError for a broken one."""
    index = Path(folder, _INDEX)
    single = Path(folder, _SINGLE)
    try:
        if index.is_file():
            return frozenset(json.loads(index.read_bytes())["weight_map"])
        if single.is_file():
            return frozenset(_header(single)) - {"__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"the names of the weights in {str(folder)!r} cannot be read: {error!r}"
        ) from error
    return frozenset()


def _header(path: Path) -> dict[str, object]:
    """A safetensors file begins with the length of its header (uint64, little-endian), and the
    header, a JSON object."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > path.stat().st_size:
            raise ValueError("the file is truncated")
        header: dict[str, object] = json.loads(file.read(length))
    return header
