"""Tensors of a GGUF file as a model takes them: under their names in Hugging Face layout, with the
changes undone that llama.cpp's converter makes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from toolkit_lm_gguf.blocks import decode
from toolkit_lm_gguf.config import family_of
from toolkit_lm_gguf.container import TensorInfo
from toolkit_lm_gguf.families import ROPE_TENSORS, Family, Place, place_of
from toolkit_lm_gguf.file import GGUFFile

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def tensors_of(file: GGUFFile, *, quantized: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors, mapped or made one by one. `quantized`: those of quantized types as their
    blocks, [..., blocks of a row, bytes of a block] uint8; otherwise in float32."""
    family = family_of(file)
    heads = {
        "attn_q": file.require("{arch}.attention.head_count", int),
        "attn_k": file.find("{arch}.attention.head_count_kv", int)
        or file.require("{arch}.attention.head_count", int),
    }
    for name, info in file.tensors.items():
        if name in ROPE_TENSORS:
            continue
        place = _place(file, family, name)
        tensor = _mapped(info)
        if family.is_permuted and place.stem in heads:
            tensor = in_halves(tensor, heads[place.stem])
        if family.norms_plus_one and place.stem.endswith("norm"):
            tensor = tensor.float() - 1
        if not place.is_stacked:
            yield place.name, _converted(info, tensor, quantized)
            continue
        for index, expert in enumerate(tensor):
            yield place.name.format(e=index), _converted(info, expert, quantized)


def types_of(file: GGUFFile) -> Iterator[tuple[str, TensorInfo]]:
    """Yields the name in Hugging Face layout and the tensor that holds it."""
    family = family_of(file)
    for name, info in file.tensors.items():
        if name in ROPE_TENSORS:
            continue
        place = _place(file, family, name)
        if place.is_stacked:
            yield from ((place.name.format(e=expert), info) for expert in range(info.shape[0]))
        else:
            yield place.name, info


def _place(file: GGUFFile, family: Family, name: str) -> Place:
    place = place_of(family, name)
    if place is None:
        file.fail(f"holds the tensor {name}, which {family.architecture} does not have")
    return place


def floats(info: TensorInfo) -> Tensor:
    """A tensor of the mapped file, in floats."""
    return _converted(info, _mapped(info), quantized=False)


def _mapped(info: TensorInfo) -> Tensor:
    """Blocks, or floats, of the mapped file."""
    raw = torch.frombuffer(info.data, dtype=torch.uint8, count=info.num_bytes, offset=info.start)
    if info.type.is_quantized:
        return raw.view(*info.shape[:-1], -1, info.type.block_bytes)
    return raw.view(_FLOATS[info.type.name]).view(info.shape)


def _converted(info: TensorInfo, tensor: Tensor, quantized: bool) -> Tensor:
    if quantized or not info.type.is_quantized:
        # Blocks are views until their layer is made: it says when they are read.
        tensor.release = info.release  # type: ignore[attr-defined]
        return tensor
    return decode(info.type, tensor).dequantized()


def in_halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys [heads * size, ...]: of each head, pairs (0, size / 2), (1, size / 2
    + 1), ... -> first half, second half."""
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).flatten(0, 2)
