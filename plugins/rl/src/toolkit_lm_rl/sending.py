"""Tensors on their way to workers: safetensors files in shared memory, never pickle."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

_MOST_BYTES = 256 << 20
"""Bytes of tensors from which on a file is sent."""
_SHARED = Path("/dev/shm")  # nosec B108


@contextmanager
def sent(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Iterator[str]]:
    """Context with the paths of files that hold the tensors. Each may be deleted when the next one
    is asked for."""
    folder = _SHARED if os.access(_SHARED, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="toolkit_lm-weights-", dir=folder) as place:
        yield _files(tensors, Path(place))


def _files(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> Iterator[str]:
    path = folder / "weights.safetensors"
    piece: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        # Neither views nor tied tensors can be written, and a trainer changes its own.
        piece[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += piece[name].nbytes
        if size >= _MOST_BYTES:
            save_file(piece, path)
            yield str(path)
            path.unlink()
            piece = {}
            size = 0
    if piece:
        save_file(piece, path)
        yield str(path)
