"""A GGUF file: its metadata and its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from toolkit_lm.errors import CheckpointError


class GGUFFile:
    """An open file. Raises CheckpointError for one that is missing or broken, and for metadata that
    it lacks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except Exception as error:  # whatever a broken header leads to
            raise CheckpointError(
                f"{path} is no readable GGUF file; it may be truncated: {error}"
            ) from error
        self.architecture: str = self.require("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata; "{arch}" in its key is the architecture."""
        field = self._reader.fields.get(key.format(arch=getattr(self, "architecture", "")))
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.path} states no {key}.")
        return value

    def tensors(self) -> dict[str, ReaderTensor]:
        return {tensor.name: tensor for tensor in self._reader.tensors}

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Each tensor's name and float32 values, dequantized one by one."""
        for tensor in self._reader.tensors:
            try:
                values = dequantize(tensor.data, tensor.tensor_type)
            # whatever gguf raises for a type that it cannot dequantize, or data that end too early
            except Exception as error:
                raise CheckpointError(
                    f"{self.path}: {tensor.name} ({tensor.tensor_type.name}) cannot be "
                    f"dequantized: {error}"
                ) from error
            # The file's own memory cannot be written to, which torch warns of.
            yield tensor.name, np.array(values, dtype=np.float32)
