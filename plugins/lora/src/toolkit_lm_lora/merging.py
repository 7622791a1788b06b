"""Writes a checkpoint with an adapter merged into its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm.model import CheckpointLoader, LinearBase, construct
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve
from toolkit_lm.runner import load_model_class
from torch import Tensor

from toolkit_lm_lora.files import AdapterFolder
from toolkit_lm_lora.joining import Part, span
from toolkit_lm_lora.names import Names
from toolkit_lm_lora.weights import Reading

_SHARD_BYTES = 4 << 30
_LEFT_OUT = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


def merge(
    config: VllmConfig, plugins: Plugins, adapters: Sequence[tuple[Path, float]], out: Path
) -> int:
    """Writes the checkpoint of `config` with adapters merged into it, each with a scale, to the
    folder `out`. Returns the number of tensors that they changed. Raises ToolkitError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"the folder {str(out)!r} is there, and is not empty.")
    resolved = resolve(config.replace(device="cpu"), plugins)
    assert resolved.checkpoint is not None
    if resolved.hf_config.get("quantization_config"):
        raise UnsupportedError(
            f"the weights of {config.model.model!r} are quantized. Merge into the checkpoint that "
            "they were made of."
        )
    folder = Path(resolved.checkpoint.path)
    loader: CheckpointLoader = plugins.loaders.make(
        resolved.load.load_format, Path(resolved.checkpoint.source or folder)
    )
    names = set(loader.names())
    dtypes: dict[str, torch.dtype] = {}
    changed: set[str] = set()

    def stored() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in loader:
            dtypes[name] = tensor.dtype
            yield name, tensor

    tensors = stored()
    for path, scale in adapters:
        read = _checked(path, scale)
        own = resolved.with_rank(0)
        tensors = _Merging(own, plugins, names, read, scale, changed).tensors(tensors)
    written = ((name, tensor.to(dtypes[name]).contiguous()) for name, tensor in tensors)
    staged = out.with_name(f".{out.name}.staged")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        staged.mkdir(parents=True)
        _write(written, staged)
        for path in folder.iterdir():
            if path.is_file() and not path.name.endswith(_LEFT_OUT):
                shutil.copy(path, staged / path.name)
        if out.exists():
            out.rmdir()
        staged.rename(out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return len(changed)


def _checked(path: Path, scale: float) -> AdapterFolder:
    """An adapter that weights can have. Raises ToolkitError."""
    read = AdapterFolder(path)
    if read.config.alora_invocation_tokens:
        raise UnsupportedError(
            f"adapter {str(path)!r} changes tokens from alora_invocation_tokens on, which merged "
            "weights cannot do."
        )
    if scale != 1 and not read.is_additive:
        raise UnsupportedError(
            f"adapter {str(path)!r} has DoRA or parameters in the place of the model's: its scale "
            "can only be 1."
        )
    return read


class _Merging:
    def __init__(
        self,
        config: VllmConfig,
        plugins: Plugins,
        stored: set[str],
        folder: AdapterFolder,
        scale: float,
        changed: set[str],
    ) -> None:
        """`stored`: names of the checkpoint's tensors. `changed`: names of those that adapters
        change, which this one adds to."""
        self._folder = folder
        self._scale = scale
        self._changed = changed
        with plugins.boundary:
            model = construct(
                load_model_class(config, plugins), config, torch.device("meta"), plugins, stored
            )
        names = Names(model)
        paths = {id(module): path for path, module in model.named_modules()}
        self._reading = Reading(model, names, paths, {}, folder, True)
        self._reading.parse(keeps_all=True)
        self._layers: dict[str, tuple[LinearBase, int | None]] = {}
        for layer in model.modules():
            if isinstance(layer, LinearBase):
                sources = layer.spec.sources
                for place, source in enumerate(sources):
                    self._layers[source] = layer, None if len(sources) == 1 else place
        self._left: set[tuple[str, int | None, str]] = {
            (prefix, part, kind)
            for prefix, parts in self._reading.parts.items()
            for part, change in parts.items()
            for kind in _kinds(change)
        }
        # A tied head has the embedding's rows.
        self._left |= {
            (prefix, None, "tokens")
            for prefix in self._reading.tokens
            if self._reading.layers[prefix].spec.tied_to is None
        }

    def tensors(self, stored: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a checkpoint, changed, some of them in float32. Raises UnsupportedError
        for changes that it has no tensor for."""
        modules = {
            f"{path}.{suffix}": tensor
            for path, parameters in self._reading.adapter.modules.items()
            for suffix, tensor in parameters.items()
        }
        for name, tensor in stored:
            merged = modules.pop(name, None)
            if merged is None:
                merged = self._merged(name, tensor)
            if merged is not tensor:
                self._changed.add(name)
            yield name, merged
        left = [
            *modules,
            *(f"{prefix} ({kind})" for prefix, _, kind in sorted(self._left, key=str)),
        ]
        if left:
            raise UnsupportedError(
                f"adapter {str(self._folder.path)!r} cannot be merged: the checkpoint has no "
                f"tensor of its own for {', '.join(left[:5])}."
            )

    def _merged(self, name: str, tensor: Tensor) -> Tensor:
        source, _, suffix = name.rpartition(".")
        if source not in self._layers or suffix not in ("weight", "bias"):
            return tensor
        layer, place = self._layers[source]
        parts = self._reading.parts.get(layer.prefix, {})
        for part in {place, None}:
            if (change := parts.get(part)) is not None:
                rows = slice(None)
                if place is not None and part is None:
                    rows = span(layer, place)
                if suffix == "bias":
                    tensor = self._biased(tensor, change, rows, layer, part)
                else:
                    tensor = self._weighted(tensor, change, rows, layer, part)
        if suffix == "weight" and layer.prefix in self._reading.tokens:
            indices, rows_of = self._reading.tokens[layer.prefix]
            tensor = tensor.clone()
            tensor[indices] = rows_of.to(tensor.dtype)
            self._left.discard((layer.prefix, None, "tokens"))
        return tensor

    def _biased(
        self, tensor: Tensor, change: Part, rows: slice, layer: LinearBase, part: int | None
    ) -> Tensor:
        if change.shift is None:
            return tensor
        self._left.discard((layer.prefix, part, "bias"))
        if change.replaces_bias:
            return change.shift[rows]
        return tensor.float() + self._scale * change.shift[rows]

    def _weighted(
        self, tensor: Tensor, change: Part, rows: slice, layer: LinearBase, part: int | None
    ) -> Tensor:
        self._left.discard((layer.prefix, part, "weight"))
        is_transposed = self._folder.config.fan_in_fan_out and layer.spec.kind == "linear"
        weight = tensor.float().T if is_transposed else tensor.float()
        if change.weight is not None:
            weight = change.weight.float()[rows]
        elif change.low is not None and change.high is not None:
            low = change.low.float()
            high = self._scale * change.high.float()
            is_embedding = layer.spec.kind == "embedding"
            weight = weight + (low @ high.T if is_embedding else high[rows] @ low)
            if change.magnitude is not None:
                norm = weight.norm(dim=1, keepdim=True)
                weight = weight * (change.magnitude[rows].unsqueeze(1) / norm)
        else:
            return tensor
        return weight.T if is_transposed else weight


def _kinds(change: Part) -> list[str]:
    found = []
    if change.low is not None or change.weight is not None:
        found.append("weight")
    if change.shift is not None:
        found.append("bias")
    return found


def _write(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Writes tensors in files of at most 4 GiB, with an index of which file has which."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        save_file(held, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append([*held])
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > _SHARD_BYTES:
            flush()
            size = 0
        held[name] = tensor.clone()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    index: dict[str, str] = {}
    for number, names in enumerate(shards):
        final = "model.safetensors"
        if len(shards) > 1:
            final = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"part-{number}").rename(folder / final)
        index |= dict.fromkeys(names, final)
    if len(shards) > 1:
        described = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(described))
