"""The contract of what reads checkpoints. Importing it needs no torch."""

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
    """The tensors of one checkpoint: iterating gives (name, full tensor), named and laid out as the
    model's own checkpoints have them.

    Where `unpack` is defined, the module of the class must not import torch: the process that reads
    config.json never does.
    """

    def __init__(self, source: str | Path) -> None:
        """`source`: the checkpoint's folder, or its file. Raises CheckpointError that names a
        missing or broken file."""
        self.source = Path(source)

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """On the CPU. Tensors are best mapped or made one by one: a model may take only a part of
        each, or store it in fewer bits."""

    def names(self) -> Iterable[str]:
        """The names of the tensors, in any order. This reads them all: a loader that knows better
        overrides it."""
        return [name for name, _ in self]

    def __str__(self) -> str:
        """What errors call it."""
        return str(self.source)

    def load(self, model: Model) -> None:
        """Fills the model. Raises CheckpointError for weights that are missing, unexpected or do
        not fit."""
        model.load_weights(self)

    @classmethod
    def unpack(cls, file: Path, options: Any) -> Path:
        """A folder in Hugging Face layout, weights aside, for a checkpoint that is one file:
        config.json, tokenizer.json, ... `options`: of the plugin that brings the loader; None where
        it has none.

        It must outlive the engine. Several processes may ask for it at once. Raises
        CheckpointError.
        """
        raise CheckpointError(
            f"model {str(file)!r} is a file; it must be the folder that holds it."
        )
