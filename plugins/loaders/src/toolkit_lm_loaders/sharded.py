"""Weights as ranks hold them: a file or several for each rank, so that none reads another's.

A folder has `model-rank-R-part-P.safetensors`, and sharded_state.json, which says for what engine
they are. Names and shapes are the model's own, after its shard was taken of the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.model import CheckpointLoader, Model
from torch import Tensor

INFO = "sharded_state.json"
MAX_SIZE = 5 << 30
"""Bytes after which a rank begins another file."""
_FORMAT = 1
_MOST_BYTES = 1 << 28
"""Most bytes of sharded_state.json."""


class ShardedStateLoader(CheckpointLoader):
    """A folder that `save_sharded_state` wrote. It fits engines with the same model, ranks and
    dtype alone. Raises CheckpointError."""

    def __init__(self, source: str | Path) -> None:
        super().__init__(source)
        path = self.source / INFO
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise CheckpointError(f"{path} is too large: it may have {_MOST_BYTES} bytes.")
            self._info = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(self._info, dict) or self._info.get("format") != _FORMAT:
            raise CheckpointError(f"{path} is of another format than {_FORMAT}.")

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        raise CheckpointError(
            f"{self.source} holds what each rank has of a model, and no whole tensors: use the "
            "checkpoint that it was saved from."
        )

    def names(self) -> list[str]:
        """Names of the checkpoint's tensors that it was saved from."""
        return [str(name) for name in self._info.get("names", ())]

    def load(self, model: Model) -> None:
        config = model.vllm_config
        for name, value in traits(config).items():
            if (saved := self._info.get(name)) != value:
                raise CheckpointError(
                    f"it was saved with {name} {saved!r}, and the engine has {value!r}."
                )
        rank = config.parallel.rank
        state = model.state_dict()
        missing = dict.fromkeys(state)
        files = sorted(self.source.glob(_file(rank, "*")))
        for path in files:
            try:
                tensors = load_file(path)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            for name, tensor in tensors.items():
                if name not in missing:
                    raise CheckpointError(f"{path.name}: the model has no {name!r}.")
                del missing[name]
                _fill(name, state[name], tensor)
        if missing:
            raise CheckpointError(
                f"{', '.join([*missing][:3])} of rank {rank} are in none of its {len(files)} files."
            )


class SavingLoader(CheckpointLoader):
    """A checkpoint whose tensors a rank writes into a folder, once its model has taken them."""

    def __init__(self, inner: CheckpointLoader, folder: Path, max_size: int) -> None:
        super().__init__(inner.source)
        self._inner = inner
        self._folder = folder
        self._max_size = max_size

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._inner)

    def names(self) -> Iterable[str]:
        return self._inner.names()

    def __str__(self) -> str:
        return str(self._inner)

    def load(self, model: Model) -> None:
        """Fills the model, and writes its state. Raises UnsupportedError for a model that keeps
        something of the checkpoint elsewhere."""
        stated = model.state_dict()
        others = {
            name: buffer.clone() for name, buffer in model.named_buffers() if name not in stated
        }
        self._inner.load(model)
        for name, buffer in model.named_buffers():
            if name in others and not torch.equal(buffer, others[name]):
                raise UnsupportedError(
                    f"{type(model).__name__} reads {name}, which is no part of its state: "
                    "sharded_state cannot hold it."
                )
        save_shard(model, self._folder, self.names(), self._max_size)


def traits(config: VllmConfig) -> dict[str, Any]:
    """Traits of an engine that a folder fits. Raises UnsupportedError for quantized weights."""
    if config.load.quantization != "none":
        raise UnsupportedError(
            f"sharded_state holds no quantized weights ({config.load.quantization}): each rank "
            "reads its part of the checkpoint."
        )
    parallel = config.parallel
    assert config.checkpoint is not None, "the config is resolved"
    return {
        "architecture": config.checkpoint.architecture,
        "dtype": config.model.dtype,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "enable_expert_parallel": parallel.enable_expert_parallel,
    }


def save_shard(model: Model, folder: Path, names: Iterable[str], max_size: int = MAX_SIZE) -> None:
    """Writes a rank's state, and for rank 0 what the folder is. `names`: those of the checkpoint's
    tensors. Files of the rank that are there are replaced. Raises CheckpointError."""
    config = model.vllm_config
    rank = config.parallel.rank
    info = {"format": _FORMAT, **traits(config), "names": [*names]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(_file(rank, "*")):
            path.unlink()
        for part, piece in enumerate(_pieces(model.state_dict(), max_size)):
            save_file(piece, folder / _file(rank, part))
        if rank == 0:
            (folder / INFO).write_text(json.dumps(info), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def _pieces(state: dict[str, Tensor], max_size: int) -> Iterator[dict[str, Tensor]]:
    piece: dict[str, Tensor] = {}
    size = 0
    for name, tensor in state.items():
        if piece and size + tensor.nbytes > max_size:
            yield piece
            piece = {}
            size = 0
        # A copy: tied tensors share memory, which files cannot say.
        piece[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    yield piece


def _fill(name: str, param: Tensor, tensor: Tensor) -> None:
    if (param.shape, param.dtype) != (tensor.shape, tensor.dtype):
        raise CheckpointError(
            f"{name} has the shape {tuple(tensor.shape)} and dtype {tensor.dtype}, and the model "
            f"{tuple(param.shape)} and {param.dtype}."
        )
    with torch.no_grad():
        param.copy_(tensor)


def _file(rank: int, part: int | str) -> str:
    return f"model-rank-{rank}-part-{part}.safetensors"
