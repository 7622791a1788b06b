"""The contract of checkpoint writers: formats that `toolkit quantize` writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import CheckpointLoader, LayerKind
from torch import Tensor


class WeightScheme(Protocol):
    """How a weight is quantized. Its text, as of `str`, is for users."""

    @property
    def name(self) -> str:
        """Name of the quantization: "int8", "int4", "fp8"."""

    @property
    def group(self) -> int | None:
        """Inputs that have one scale. None: all inputs of an output."""

    def rounded(self, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Quantizes rows of a weight, [N, K], with scales in a floating dtype.

        Returns codes [N, K] in float32, and scales [N, G] in `dtype`: the codes are the nearest for
        these scales. Raises CheckpointError for values that are not finite, or too large.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalLayer:
    """A module of the checkpoint that holds the weight of a linear layer, an embedding or a head.
    Several may be one layer of the model."""

    kind: LayerKind
    scheme: WeightScheme | None
    """How the options say that it is quantized. None: it stays as it is."""
    chooses_experts: bool = False
    """Whether its outputs choose experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """The checkpoint that is written in another format. Its weights are floats."""

    config: VllmConfig
    """The resolved config."""
    folder: Path
    """Folder of config.json, the tokenizer's files and what else is beside the weights."""
    weights: CheckpointLoader
    layers: Mapping[str, OriginalLayer]
    """By the name of the module: the tensor is this name and ".weight"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTensors:
    """Sizes and modules of a checkpoint that a writer has written."""

    num_bytes: int
    """Bytes of the tensors."""
    num_original_bytes: int
    """Bytes of the original's tensors."""
    quantized: Mapping[str, int]
    """Number of weights by the name of what they are stored in."""
    kept: list[str]
    """Names of modules in `Original.layers` whose weights stay floats."""


class CheckpointWriter(ABC):
    """Writes checkpoints in one format."""

    suffix: ClassVar[str | None] = None
    """Suffix of the file, such as ".gguf", where a checkpoint of the format is one file. None: it
    is a folder."""

    def __init__(self, original: Original) -> None:
        """Decides how each weight is stored, and reads none. Raises UnsupportedError for what the
        format cannot hold, with what it can."""
        self.original = original

    @abstractmethod
    def write(self, folder: Path, shard_bytes: int) -> WrittenTensors:
        """Writes the checkpoint into an empty folder. With a `suffix` that is one file, whose name
        ends so.

        `shard_bytes`: most bytes of a file of weights, and of memory for tensors, where the format
        has several files. The caller removes the folder if this raises: CheckpointError for weights
        that cannot be, OSError for a disk that is full.
        """
