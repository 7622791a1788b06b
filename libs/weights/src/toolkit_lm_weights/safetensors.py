"""The tensors of a checkpoint folder, mapped from its safetensors files."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import CheckpointLoader
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
_SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
_MOST_MAPPED = 2**27
"""Bytes of a file that are mapped at a time, and the last tensor."""


class CheckpointWeights(CheckpointLoader):
    """Iterates over (name, tensor) of a folder with model.safetensors, or with
    model.safetensors.index.json and the files it names.

    Without an index, all shards that are numbered are read.

    Tensors are mapped: only what is read of them is read from disk. Raises CheckpointError that
    names a missing or broken file.
    """

    def __init__(self, source: str | Path) -> None:
        super().__init__(source)
        self.files = self._find()

    def __str__(self) -> str:
        if self.files == [SINGLE]:
            return str(self.source / SINGLE)
        index = self.source / INDEX
        return str(index if index.is_file() else self.source)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for file in self.files:
            with safe_open(self.source / file, framework="pt", device="cpu") as tensors:
                names = deque(tensors.keys())
            while names:
                # Pages that were read of a map count as this process's memory until the map is
                # closed.
                num_bytes = 0
                with safe_open(self.source / file, framework="pt", device="cpu") as tensors:
                    while names and num_bytes < _MOST_MAPPED:
                        tensor = tensors.get_tensor(name := names.popleft())
                        num_bytes += tensor.nbytes
                        yield name, tensor
                        del tensor

    def names(self) -> list[str]:
        found: list[str] = []
        for file in self.files:
            with safe_open(self.source / file, framework="pt", device="cpu") as tensors:
                found += tensors.keys()
        return found

    def _check(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt", device="cpu"):
                # Opening reads the header, and compares the lengths it states with the file's.
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is not a readable safetensors file; it may be truncated: {error}"
            ) from error

    def _find(self) -> list[str]:
        if (self.source / INDEX).is_file():
            files = self._indexed()
        elif (self.source / SINGLE).is_file():
            files = [SINGLE]
        elif shards := self._shards():
            files = shards
        else:
            raise CheckpointError(self._nothing())
        if missing := [file for file in files if not (self.source / file).is_file()]:
            subject = (
                f"{self.source / INDEX} names files"
                if (self.source / INDEX).is_file()
                else f"{self.source} lacks files of its weights"
            )
            raise CheckpointError(f"{subject} that are missing: {', '.join(missing)}.")
        for file in files:
            self._check(self.source / file)
        return files

    def _indexed(self) -> list[str]:
        path = self.source / INDEX
        try:
            files = set(json.loads(path.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not an index of weights: {error!r}") from error
        for file in files:
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(
                    f"{path} names {file!r}, which is not a file of the same folder."
                )
        return sorted(files)

    def _shards(self) -> list[str]:
        """The files that one without an index belongs to: all of "model-00001-of-00003.safetensors"
        and its like."""
        found = sorted(
            match[0] for path in self.source.glob(SHARDS) if (match := _SHARD.fullmatch(path.name))
        )
        counts = {int(match[1]) for name in found if (match := _SHARD.fullmatch(name))}
        if len(counts) > 1:
            raise CheckpointError(
                f"{self.source} holds shards of several checkpoints, and no {INDEX}: "
                f"{', '.join(found[:20])}."
            )
        return [
            f"model-{i + 1:05}-of-{count:05}.safetensors" for count in counts for i in range(count)
        ]

    def _nothing(self) -> str:
        if not self.source.is_dir():
            return f"there is no checkpoint folder {self.source}."
        names = sorted(entry.name for entry in self.source.iterdir())
        if pickled := [name for name in names if name.endswith((".bin", ".pt", ".pth"))]:
            return (
                f"{self.source} holds weights as pickles only ({', '.join(pickled[:3])}), which "
                "can run code and are not read. "
                "Convert to safetensors: load it with transformers and call save_pretrained."
            )
        return (
            f"{self.source} holds neither {SINGLE} nor {INDEX}. It holds: "
            f"{', '.join(names[:20]) or 'nothing'}."
        )
