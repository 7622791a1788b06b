"""Writes a checkpoint of floats in another format, its weights quantized as the options say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm.model import CheckpointLoader, LinearBase, construct
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve
from toolkit_lm.runner import load_model_class
from toolkit_lm_weights.registry import CheckpointWriterRegistry
from toolkit_lm_weights.writer import CheckpointWriter, Original, OriginalLayer

from toolkit_lm_quantize.at_load import ROUTERS, QuantizingReader
from toolkit_lm_quantize.schemes import SCHEMES


@dataclass(frozen=True)
class Written:
    """A checkpoint that was written."""

    path: str
    """Its folder, or its file."""
    num_bytes: int
    """Bytes of its tensors."""
    num_original_bytes: int
    quantized: Mapping[str, int]
    """Number of the checkpoint's weights by what they are stored in."""
    kept: list[str]
    """Modules of linear layers and embeddings whose weights stay floats."""


def write_checkpoint(
    config: VllmConfig, plugins: Plugins, out: Path, *, format: str, shard_bytes: int
) -> Written:
    """Writes a checkpoint of floats in a format, quantized as `--quantization` says, to `out`: a
    folder that holds nothing, or a file of the format's suffix. Raises ToolkitError."""
    writers = plugins.brought_registry(CheckpointWriterRegistry)
    # An unknown name is told before the model is looked at.
    kind: type[CheckpointWriter] = writers.load(format)
    is_file = kind.suffix is not None and out.suffix == kind.suffix
    if out.exists() and (is_file or not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {str(out)!r} is there, and is no empty folder.")
    writer: CheckpointWriter = writers.make(format, _original(config, plugins))
    staged = out.with_name(f".{out.name}.staged")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        with writers.get(format).owner.boundary(f"writing {format}"), _telling(out):
            staged.mkdir(parents=True)
            found = writer.write(staged, shard_bytes)
            made = next(staged.iterdir()) if is_file else staged
            if out.exists():
                out.rmdir()
            made.rename(out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return Written(
        path=str(out),
        num_bytes=found.num_bytes,
        num_original_bytes=found.num_original_bytes,
        quantized=found.quantized,
        kept=found.kept,
    )


@contextmanager
def _telling(out: Path) -> Iterator[None]:
    """Raises ConfigError, which names `out`, for what cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {str(out)!r} cannot be written: {error}") from error


def _original(config: VllmConfig, plugins: Plugins) -> Original:
    """The checkpoint, and how the options say that its weights are quantized. Raises
    UnsupportedError if they are quantized already."""
    resolved = resolve(config.replace(device="cpu"), plugins)
    stated = resolved.load.quantization
    is_quantized = bool(resolved.hf_config.get("quantization_config"))
    if is_quantized or stated.removesuffix(" at load") not in ("none", *SCHEMES):
        raise UnsupportedError(
            f"the weights of {config.model.model!r} are quantized already ({stated}). toolkit "
            "quantize needs the checkpoint of floats that they were made of."
        )
    assert resolved.checkpoint is not None
    source = Path(resolved.checkpoint.source or resolved.checkpoint.path)
    loader: CheckpointLoader = plugins.loaders.make(resolved.load.load_format, source)
    return Original(
        config=resolved,
        folder=Path(resolved.checkpoint.path),
        weights=loader,
        layers=_layers(resolved, plugins, loader),
    )


def _layers(
    config: VllmConfig, plugins: Plugins, loader: CheckpointLoader
) -> dict[str, OriginalLayer]:
    """The modules of the checkpoint that hold weights of layers."""
    names = set(loader.names())
    own = config.with_rank(0)
    with plugins.boundary:
        model = construct(load_model_class(own, plugins), own, torch.device("meta"), plugins, names)
    found: dict[str, OriginalLayer] = {}
    for layer in model.modules():
        if not isinstance(layer, LinearBase):
            continue
        method = layer.method
        if isinstance(method, QuantizingReader):
            method.quantization.check()
        for source in layer.spec.sources:
            if source in found:
                continue
            is_stored = f"{source}.weight" in names
            found[source] = OriginalLayer(
                kind=layer.spec.kind,
                scheme=method.scheme
                if is_stored and isinstance(method, QuantizingReader)
                else None,
                chooses_experts=layer.prefix.rpartition(".")[2] in ROUTERS,
            )
    return found
