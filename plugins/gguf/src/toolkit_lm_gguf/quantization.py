"""GGUFQuantization: layers whose weights stay in the types of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    Kernels,
    LinearMethod,
    LinearSpec,
    Quantization,
    QuantizedReader,
    QuantizedWeight,
    new_parameter,
)
from torch import Tensor, nn

from toolkit_lm_gguf.blocks import concatenated, decode
from toolkit_lm_gguf.file import GGUFFile
from toolkit_lm_gguf.loader import GGUFLoader
from toolkit_lm_gguf.tensors import types_of
from toolkit_lm_gguf.types import TensorType


class GGUFQuantization(Quantization):
    """Weights in the types of the file. A layer whose weights are floats there stays as it is."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        assert vllm_config.checkpoint is not None, "the config is resolved"
        checkpoint = vllm_config.checkpoint
        file = GGUFFile(Path(checkpoint.source or checkpoint.path))
        self.types = {
            name.removesuffix(".weight"): info.type
            for name, info in types_of(file)
            if name.endswith(".weight")
        }

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        load_format = vllm_config.load.load_format
        if load_format == "gguf":
            return None
        return f"it reads the blocks of GGUF files, and the load format is {load_format!r}"

    def adapt(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return weights.blocks() if isinstance(weights, GGUFLoader) else weights

    def method(self, spec: LinearSpec) -> LinearMethod | None:
        if isinstance(spec.tied_to, BlocksReader):
            return BlocksReader(self.kernels, spec.tied_to.types)
        types = [self.types.get(source) for source in spec.sources]
        known = tuple(of_type for of_type in types if of_type is not None)
        if len(known) < len(types) or not any(of_type.is_quantized for of_type in known):
            return None
        if all(of_type.is_quantized for of_type in known):
            return BlocksReader(self.kernels, known)
        return DequantizedMethod(self.plain(spec), known)


class BlocksReader(QuantizedReader):
    """Reads a layer's blocks. Each of the weights that the layer packs has a type of its own."""

    def __init__(self, kernels: Kernels, types: Sequence[TensorType]) -> None:
        super().__init__(kernels)
        self.types = types

    def __str__(self) -> str:
        return _names(self.types)

    def make_parameters(self, spec: LinearSpec) -> dict[str, nn.Parameter]:
        loader = _BlocksLoader(spec, self.types)
        loader.parameter = new_parameter((loader.ends[-1],), torch.uint8, loader)
        return {"weight": loader.parameter}

    def read(self, spec: LinearSpec, loaded: Mapping[str, Tensor]) -> QuantizedWeight:
        parameter: Any = self.parameters["weight"]
        loader: _BlocksLoader = parameter.weight_loader
        weight = concatenated(
            [
                decode(of_type, share.to(parameter.device))
                for of_type, share in zip(loader.types, loader.shares, strict=True)
            ]
        )
        for release in loader.releases:
            release()
        if not weight.scales.is_meta and not weight.scales.isfinite().all():
            raise CheckpointError(f"{spec.prefix}: the blocks of its weight have scales of NaN")
        return weight


class _BlocksLoader:
    """Weight loader of a parameter of blocks: those of several weights, one after the other.

    The file is mapped, so that the parameter itself is never written: its memory would be held
    beside that of the kernels' weights.
    """

    parameter: nn.Parameter

    def __init__(self, spec: LinearSpec, types: Sequence[TensorType]) -> None:
        """Raises ConfigError if this rank's inputs cut through a block."""
        outputs = spec.outputs
        if len(types) < len(outputs):
            # The checkpoint holds all of them in one tensor.
            types = [types[0]] * len(outputs)
        self.types = types
        self.outputs = outputs
        axis = f"inputs of {spec.prefix}"
        self.inputs = [spec.inputs.stored(axis, pack=of_type.block) for of_type in types]
        self.ends = [0]
        for output, blocks, of_type in zip(outputs, self.inputs, types, strict=True):
            self.ends.append(self.ends[-1] + output.size * blocks.size * of_type.block_bytes)
        self.shares = [
            torch.empty(
                output.size, blocks.size, of_type.block_bytes, dtype=torch.uint8, device="meta"
            )
            for output, blocks, of_type in zip(outputs, self.inputs, types, strict=True)
        ]
        """This rank's blocks of each weight: [N, blocks of a row, bytes of a block] uint8. They
        have no values until they are loaded."""
        self.releases: list[Callable[[], None]] = []
        """What gives the mapped pages of the shares back, once these are read."""

    def __call__(self, param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
        if (release := getattr(loaded, "release", None)) is not None:
            self.releases.append(release)
        if shard_id is None and len(self.outputs) > 1:
            sizes = [output.full for output in self.outputs]
            if len(loaded) != sum(sizes):
                raise CheckpointError(f"has {len(loaded)} rows, not {sum(sizes)}")
            for index, piece in enumerate(torch.split(loaded, sizes)):
                self(param, piece, index)
            return
        index = shard_id or 0
        share = self._share(loaded, index)
        if param is self.parameter:
            self.shares[index] = share
        else:
            # Somebody compares a tensor with the parameter.
            param.data[self.ends[index] : self.ends[index + 1]] = share.flatten()

    def _share(self, loaded: Tensor, index: int) -> Tensor:
        output = self.outputs[index]
        blocks = self.inputs[index]
        shape = [output.full, blocks.full, self.types[index].block_bytes]
        if list(loaded.shape) != shape:
            raise CheckpointError(f"has shape {list(loaded.shape)} of blocks, not {shape}")
        share = loaded.narrow(1, blocks.start, blocks.size)[output.start :][: output.size]
        # Entries past the end of the vocabulary are zero.
        padding = output.size - len(share)
        return torch.cat((share, share.new_zeros(padding, *share.shape[1:]))) if padding else share


class DequantizedMethod(LinearMethod):
    """Holds a layer's weight as floats, since some of the weights that it packs are floats in the
    file. Once it is loaded, `inner` takes its place in the layer."""

    def __init__(self, inner: LinearMethod, types: Sequence[TensorType]) -> None:
        self.inner = inner
        self.types = types

    def __str__(self) -> str:
        return f"{_names(self.types)}, in floats"

    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        self.inner.create(layer, spec)
        weight: Any = layer.get_parameter("weight")
        inner_loader = weight.weight_loader

        def load(param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
            of_type = self.types[shard_id or 0]
            if of_type.is_quantized:
                loaded = decode(of_type, loaded).dequantized()
            inner_loader(param, loaded, shard_id)

        weight.weight_loader = load

    def process(self, layer: nn.Module) -> None:
        layer.method = self.inner  # type: ignore[assignment]
        self.inner.process(layer)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        raise AssertionError("the weight is not loaded")


def _names(types: Sequence[TensorType]) -> str:
    """Names of types, each once."""
    return " and ".join(dict.fromkeys(of_type.name for of_type in types))
