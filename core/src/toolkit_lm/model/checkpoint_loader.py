"""The contract of checkpoint loaders. Importing it needs no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit_lm.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit_lm.model.contract import Model


class CheckpointLoader(ABC):
    """The tensors of one checkpoint. Iterating yields (name, full tensor), named and laid out as in
    the model's own checkpoints.

    If `unpack` is defined, the module of the class must not import torch: the process that reads
    config.json never does.
    """

    def __init__(self, source: str | Path) -> None:
        """`source`: the checkpoint's folder, or its file. Raises CheckpointError, which names the
        missing or broken file."""
        self.source = Path(source)

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors, on the CPU. They are best mapped or made one by one: a model may take
        only a part of each, or store it in fewer bits."""

    def names(self) -> Iterable[str]:
        """Names of the tensors, in any order. By default this reads them all. A loader that knows
        the names overrides it."""
        return [name for name, _ in self]

    def __str__(self) -> str:
        """Name of the checkpoint in errors."""
        return str(self.source)

    def load(self, model: Model) -> None:
        """Fills the model. Raises CheckpointError for weights that are missing, unexpected or do
        not fit."""
        quantization = model.quantization
        model.load_weights(self if quantization is None else quantization.adapt(self))

    @classmethod
    def unpack(cls, file: Path, options: Any) -> Path:
        """Returns a folder in Hugging Face layout, without weights, for a checkpoint that is one
        file, or a folder without config.json: config.json, tokenizer.json, ... `options`: options
        of the plugin that brings the loader, or None.

        The folder must outlive the engine. Several processes may call this at once. Raises
        CheckpointError.
        """
        problem = (
            "has no config.json: it is not a checkpoint in Hugging Face layout"
            if file.is_dir()
            else "is a file; it must be the folder that holds it"
        )
        raise CheckpointError(f"model {str(file)!r} {problem}.")
