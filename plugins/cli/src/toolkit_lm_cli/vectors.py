"""Files of vectors: .npy and .parquet. Rows are written as they come, so that they need not fit in
memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from toolkit_lm.errors import ConfigError

_GROUP = 1024
"""Rows that a .parquet file takes at once."""


class VectorFile(Protocol):
    """One row for each index, in any order."""

    def put(
        self, index: int, text: str, vector: np.ndarray | None, error: str | None = None
    ) -> None:
        """Row `index`: a vector [D] float32, or None with the error."""

    def close(self) -> None:
        """Writes what is left."""


class NpyFile:
    """An array [rows, D] float32; rows without a vector are NaN. It stays empty when no row has
    one."""

    def __init__(self, path: Path, num_rows: int) -> None:
        self._path = path
        self._num_rows = num_rows
        self._array: np.memmap[Any, Any] | None = None
        """None: how long vectors are is not known."""
        self._without: list[int] = []

    def put(
        self, index: int, text: str, vector: np.ndarray | None, error: str | None = None
    ) -> None:
        if vector is None:
            self._without.append(index)
            return
        if self._array is None:
            self._array = np.lib.format.open_memmap(
                self._path, "w+", np.float32, (self._num_rows, vector.size)
            )
        self._array[index] = vector

    def close(self) -> None:
        if self._array is not None:
            self._array[self._without] = np.nan
            self._array.flush()
            self._array = None


class ParquetFile:
    """Columns `text`, `vector` (null where there is none) and `error`, in the order of the
    indices."""

    def __init__(self, path: Path, num_rows: int) -> None:
        try:
            self._arrow = import_module("pyarrow")
            parquet = import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError(
                "option 'out': .parquet files need pyarrow: pip install 'toolkit-lm-cli[parquet]'."
            ) from error
        arrow = self._arrow
        self._schema = arrow.schema(
            [
                ("text", arrow.string()),
                ("vector", arrow.list_(arrow.float32())),
                ("error", arrow.string()),
            ]
        )
        self._writer = parquet.ParquetWriter(path, self._schema)
        self._waiting: dict[int, tuple[str, np.ndarray | None, str | None]] = {}
        self._rows: list[tuple[str, np.ndarray | None, str | None]] = []
        self._next = 0

    def put(
        self, index: int, text: str, vector: np.ndarray | None, error: str | None = None
    ) -> None:
        self._waiting[index] = text, vector, error
        while self._next in self._waiting:
            self._rows.append(self._waiting.pop(self._next))
            self._next += 1
        if len(self._rows) >= _GROUP:
            self._write()

    def close(self) -> None:
        if self._rows:
            self._write()
        self._writer.close()

    def _write(self) -> None:
        columns = [list(column) for column in zip(*self._rows, strict=True)]
        arrays = [
            self._arrow.array(column, kind)
            for column, kind in zip(columns, self._schema.types, strict=True)
        ]
        self._writer.write_table(self._arrow.table(arrays, schema=self._schema))
        self._rows = []


_KINDS: dict[str, Callable[[Path, int], VectorFile]] = {".npy": NpyFile, ".parquet": ParquetFile}


def check_path(path: Path) -> None:
    """Raises ConfigError for a file of a kind that is not known, and for a folder."""
    if path.suffix not in _KINDS:
        raise ConfigError(f"option 'out': {str(path)!r} must end in {' or '.join(_KINDS)}.")
    if path.is_dir():
        raise ConfigError(f"option 'out': {str(path)!r} is a folder; give a file.")


@contextmanager
def vector_file(path: Path, num_rows: int) -> Iterator[VectorFile]:
    """A file of `num_rows` rows. It gets its name at the end of the block, if no error occurred and
    a row was written.

    Raises ConfigError."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.touch()
    except OSError as error:
        raise ConfigError(f"option 'out': {str(path)!r} cannot be written: {error}") from error
    try:
        file = _KINDS[path.suffix](part, num_rows)
        try:
            yield file
        finally:
            file.close()
        if part.stat().st_size:
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
