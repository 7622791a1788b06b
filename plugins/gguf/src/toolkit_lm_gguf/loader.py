"""GGUFLoader: the weights of a GGUF checkpoint, and the folder in Hugging Face layout that the rest
of it makes. Importing it needs no torch."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import CheckpointLoader

from toolkit_lm_gguf.config import hf_config
from toolkit_lm_gguf.file import GGUFFile, find_files
from toolkit_lm_gguf.tokenizer import generation_config, tokenizer, tokenizer_config

if TYPE_CHECKING:
    from torch import Tensor

_LAYOUT = 1
"""Version of what is unpacked. It rises with each change of what is written into the folder."""


class GGUFLoader(CheckpointLoader):
    """A GGUF file, any file of a split checkpoint, or the folder that holds one.

    Iterating dequantizes: `GGUFQuantization` takes `blocks` instead.
    """

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        from toolkit_lm_gguf.tensors import tensors_of

        return tensors_of(GGUFFile(self.source), quantized=False)

    def names(self) -> Iterable[str]:
        from toolkit_lm_gguf.tensors import types_of

        return [name for name, _ in types_of(GGUFFile(self.source))]

    def blocks(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors, those of quantized types as their blocks: [..., blocks of a row,
        bytes of a block] uint8."""
        from toolkit_lm_gguf.tensors import tensors_of

        return tensors_of(GGUFFile(self.source), quantized=True)

    @classmethod
    def unpack(cls, file: Path, options: Any) -> Path:
        folder = _cache() / _key(file)
        if folder.is_dir():
            return folder
        opened = GGUFFile(file)
        texts = {
            "config.json": json.dumps(hf_config(opened)),
            "generation_config.json": json.dumps(generation_config(opened)),
            "tokenizer_config.json": json.dumps(tokenizer_config(opened)),
            "tokenizer.json": tokenizer(opened).to_str(),
        }
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        for name, text in texts.items():
            (made / name).write_text(text, encoding="utf-8")
        try:
            made.rename(folder)
        except OSError:
            # Another process was faster.
            shutil.rmtree(made)
        return folder


def _cache() -> Path:
    return Path(platformdirs.user_cache_dir("toolkit_lm")) / "gguf"


def _key(source: Path) -> str:
    """Other files, or another content, have another key."""
    stated = [str(_LAYOUT)]
    for path in find_files(source):
        try:
            stat = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        stated.append(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(stated).encode()).hexdigest()[:32]
