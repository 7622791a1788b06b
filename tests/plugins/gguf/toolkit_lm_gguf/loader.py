"""GGUFLoader: the weights of a GGUF file, dequantized; and the folder in Hugging Face layout that
the rest of it makes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import CheckpointLoader

from toolkit_lm_gguf.config import hf_config
from toolkit_lm_gguf.file import GGUFFile
from toolkit_lm_gguf.tokenizer import tokenizer, tokenizer_config

if TYPE_CHECKING:
    from torch import Tensor

_OF_LAYERS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    "input_layernorm",
    "post_attention_layernorm",
)
_OTHERS = ("model.embed_tokens", "model.norm", "lm_head")
_PERMUTED = ("llama",)
"""Architectures whose queries and keys llama.cpp stores with the two halves of a head
interleaved."""


class GGUFLoader(CheckpointLoader):
    """A file, or a folder that holds one beside its config.json."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        import torch

        file = GGUFFile(self._path())
        names = _names(file)
        permuted = file.architecture in _PERMUTED
        heads = file.get("{arch}.attention.head_count")
        heads_of = {"q_proj": heads, "k_proj": file.get("{arch}.attention.head_count_kv", heads)}
        for name, array in file.arrays():
            stem, _, suffix = _renamed(name, names).rpartition(".")
            if permuted and (num_heads := heads_of.get(stem.rpartition(".")[2])):
                array = _in_halves(array, num_heads)
            yield f"{stem}.{suffix}", torch.from_numpy(array)

    def names(self) -> list[str]:
        file = GGUFFile(self._path())
        names = _names(file)
        return [_renamed(name, names) for name in file.tensors()]

    def _path(self) -> Path:
        if not self.source.is_dir():
            return self.source
        files = sorted(self.source.glob("*.gguf"))
        if len(files) != 1:
            raise CheckpointError(
                f"{self.source} holds {len(files)} GGUF files, not one: name the file."
            )
        return files[0]

    @classmethod
    def unpack(cls, file: Path, options: Any) -> Path:
        folder = _cache() / _key(file)
        if folder.is_dir():
            return folder
        opened = GGUFFile(file)
        texts = {
            "config.json": json.dumps(hf_config(opened)),
            "tokenizer_config.json": json.dumps(tokenizer_config(opened)),
        }
        texts["tokenizer.json"] = tokenizer(opened).to_str()
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


def _names(file: GGUFFile) -> dict[str, str]:
    """The names of GGUF's tensors -> those of checkpoints in Hugging Face layout, both without
    "weight" and "bias"."""
    count = file.require("{arch}.block_count")
    of_name = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    known = get_tensor_name_map(of_name[file.architecture], count)
    stems = [
        *_OTHERS,
        *(f"model.layers.{layer}.{name}" for layer in range(count) for name in _OF_LAYERS),
    ]
    return {name: stem for stem in stems if (name := known.get_name(stem)) is not None}


def _renamed(name: str, names: dict[str, str]) -> str:
    """A tensor's name in Hugging Face layout. An unknown one keeps its own, under which the model
    refuses it."""
    stem, _, suffix = name.rpartition(".")
    return f"{names.get(stem, stem)}.{suffix}"


def _in_halves(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of queries or keys [heads * size, ...]: of each head, pairs (0, size / 2), (1, size / 2
    + 1), ... -> first half, second half."""
    pairs = array.reshape(num_heads, len(array) // num_heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "toolkit_lm" / "gguf"


def _key(file: Path) -> str:
    """Another file, or another content, has another key."""
    try:
        stat = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return hashlib.sha256(
        f"1 {file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()
    ).hexdigest()[:32]
