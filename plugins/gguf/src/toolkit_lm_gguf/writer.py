"""GGUFWriter: a checkpoint in Hugging Face layout as one GGUF file, as llama.cpp's converter and
its quantizer make it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm_weights.writer import (
    CheckpointWriter,
    Original,
    OriginalLayer,
    WeightScheme,
    WrittenTensors,
)
from torch import Tensor

from toolkit_lm_gguf.config import hf_config, sizes_of
from toolkit_lm_gguf.encoding import q4_0, q8_0
from toolkit_lm_gguf.families import Family, Place, file_name, place_of
from toolkit_lm_gguf.file import GGUFFile
from toolkit_lm_gguf.metadata import family_for, head_size_of, metadata, rope_factors
from toolkit_lm_gguf.output import Output, TensorLayout
from toolkit_lm_gguf.tokenizer_metadata import check_tokenizer, tokenizer_metadata
from toolkit_lm_gguf.types import TYPES, TensorType

_BY_NAME = {of_type.name: of_type for of_type in TYPES.values()}
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Types of weights that are not quantized, by the dtype of the model."""
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
"""`general.file_type`, by the type of most weights."""
_TILE = 2**22
"""Weights that are encoded at a time."""
_NOT_WEIGHTS = "rotary_emb.inv_freq"
"""What names of tensors end in that older checkpoints hold beside weights."""


class GGUFWriter(CheckpointWriter):
    """int8 becomes Q8_0, and int4 Q4_0, with the scheme's own scales.

    Norms, biases, and layers that choose experts are in F32. What is not quantized is in the
    model's dtype.
    """

    suffix = ".gguf"

    def __init__(self, original: Original) -> None:
        super().__init__(original)
        stated = original.config.hf_config
        self.arch, self.family = family_for(stated)
        self.hf = {**stated, "head_dim": head_size_of(stated)}
        self.hf["num_key_value_heads"] = (
            stated.get("num_key_value_heads") or stated["num_attention_heads"]
        )
        sizes = sizes_of(self.hf)
        self.layouts: dict[str, TensorLayout] = {}
        self.places: dict[str, tuple[str, Place, int]] = {}
        """Of each tensor of the original: the file's tensor, its place, and the number of the
        expert."""
        for name in original.weights.names():
            if not name.endswith(_NOT_WEIGHTS):
                self._place(name, sizes)
        self._check_experts()
        self.factors = rope_factors(self.hf)
        for name, values in self.factors.items():
            self.layouts[name] = TensorLayout(_BY_NAME["F32"], (len(values),))
        self.metadata = {
            "general.architecture": self.arch,
            "general.name": Path(original.config.model.model).name,
            "general.file_type": _FILE_TYPES[self._commonest()],
            "general.quantization_version": 2,
            **metadata(self.hf, self.arch),
            **tokenizer_metadata(original.folder, self.hf),
        }

    def _place(self, name: str, sizes: dict[str, int]) -> None:
        found = file_name(self.family, name)
        place = None if found is None else place_of(self.family, found[0])
        if found is None or place is None:
            raise UnsupportedError(
                f"{self.original.weights} holds {name}, which GGUF files of the architecture "
                f"{self.arch!r} do not have"
            )
        shape = place.shape(sizes)
        module = name.removesuffix(".weight")
        layer = None if module == name else self.original.layers.get(module)
        layout = TensorLayout(self._type(module, layer, shape), shape)
        if self.layouts.setdefault(found[0], layout) != layout:
            raise UnsupportedError(
                f"a GGUF file holds all experts of a layer in one tensor, and the options quantize "
                f"{module} otherwise than another. Name them alike"
            )
        self.places[name] = found[0], place, found[1] or 0

    def _type(self, module: str, layer: OriginalLayer | None, shape: tuple[int, ...]) -> TensorType:
        if layer is None or layer.chooses_experts:
            return _BY_NAME["F32"]
        if layer.scheme is None:
            return _BY_NAME[_FLOATS[self.original.config.model.dtype]]
        of_type = _BY_NAME[_type_of(layer.scheme)]
        if shape[-1] % of_type.block:
            raise UnsupportedError(
                f"{module} has {shape[-1]} inputs, and {of_type.name} holds groups of "
                f"{of_type.block}: quantization_skip stores it as it is"
            )
        return of_type

    def _check_experts(self) -> None:
        held = Counter(name for name, place, _ in self.places.values() if place.is_stacked)
        for name, count in held.items():
            if count != (expected := self.layouts[name].shape[0]):
                raise CheckpointError(
                    f"{self.original.weights} holds {count} experts for {name}, and config.json "
                    f"states {expected}"
                )

    def _commonest(self) -> str:
        sizes: Counter[str] = Counter()
        for layout in self.layouts.values():
            sizes[layout.type.name] += math.prod(layout.shape)
        return sizes.most_common(1)[0][0]

    def write(self, folder: Path, shard_bytes: int) -> WrittenTensors:
        path = folder / "model.gguf"
        output = Output(path, self.metadata, self.layouts)
        try:
            # The reader finds what is missing.
            file = GGUFFile(path)
            hf_config(file)
            check_tokenizer(file, self.original.folder)
            for name, values in self.factors.items():
                output.write(name, 0, _bytes(torch.tensor(values)))
            num_original_bytes = 0
            for name, tensor in self.original.weights:
                num_original_bytes += tensor.nbytes
                if name in self.places:
                    self._write(output, name, tensor)
        finally:
            output.close()
        layers = self.original.layers
        types = {
            module: self.layouts[self.places[name][0]].type
            for module in layers
            if (name := f"{module}.weight") in self.places
        }
        return WrittenTensors(
            num_bytes=sum(layout.num_bytes for layout in self.layouts.values()),
            num_original_bytes=num_original_bytes,
            quantized=dict(Counter(t.name for t in types.values() if t.is_quantized)),
            kept=[module for module, of_type in types.items() if not of_type.is_quantized],
        )

    def _write(self, output: Output, name: str, tensor: Tensor) -> None:
        target, place, expert = self.places[name]
        layout = self.layouts[target]
        shape = layout.shape[1:] if place.is_stacked else layout.shape
        subject = f"{self.original.weights}: {name}"
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{subject} has shape {list(tensor.shape)}, not {list(shape)}")
        module = name.removesuffix(".weight")
        layer = self.original.layers.get(module)
        size = layout.num_bytes // (layout.shape[0] if place.is_stacked else 1)
        at = expert * size
        try:
            for encoded in _encoded(
                layout.type,
                _as_in_files(tensor, place, self.family, self.hf),
                None if layer is None else layer.scheme,
            ):
                output.write(target, at, _bytes(encoded))
                at += encoded.nbytes
        except CheckpointError as error:
            raise CheckpointError(f"{subject} {error}") from None


def _type_of(scheme: WeightScheme) -> str:
    """Raises UnsupportedError for a scheme that no type holds."""
    if scheme.name == "int8":
        return "Q8_0"
    if scheme.name == "int4" and scheme.group == 32:
        return "Q4_0"
    raise UnsupportedError(
        f"no type of a GGUF file holds {scheme}. Able: int8, which becomes Q8_0, and int4 in "
        "groups of 32 (quantization_group_size=32), which becomes Q4_0"
    )


def _as_in_files(tensor: Tensor, place: Place, family: Family, hf: dict[str, Any]) -> Tensor:
    """A weight with the changes that llama.cpp's converter makes."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    if family.is_permuted and place.stem in heads:
        # Each head: first half, second half -> pairs (0, size / 2), (1, size / 2 + 1), ...
        halves = tensor.view(hf[heads[place.stem]], 2, -1, *tensor.shape[1:])
        return halves.transpose(1, 2).flatten(0, 2)
    if family.norms_plus_one and place.stem.endswith("norm"):
        return tensor.float() + 1
    return tensor


def _encoded(of_type: TensorType, weight: Tensor, scheme: WeightScheme | None) -> Iterator[Tensor]:
    """Yields the rows of a weight as a file holds them, some at a time. Raises CheckpointError."""
    rows = weight.unsqueeze(0) if weight.ndim == 1 else weight
    for tile in torch.split(rows, max(1, _TILE // rows.shape[1])):
        if not torch.isfinite(tile).all():
            raise CheckpointError("holds values that are not finite")
        if of_type.name == "Q4_0" and scheme is not None:
            yield q4_0(*scheme.rounded(tile, torch.float16))
        elif of_type.name == "Q8_0":
            yield q8_0(tile.float())
        else:
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
            yield _finite(tile.to(dtype[of_type.name]))


def _finite(tile: Tensor) -> Tensor:
    if not torch.isfinite(tile).all():
        raise CheckpointError("holds values that are too large for float16")
    return tile


def _bytes(tensor: Tensor) -> memoryview:
    raw: Any = tensor.contiguous().view(torch.uint8).numpy()
    return memoryview(raw).cast("B")
