"""Each type's blocks stand for the weights that the package gguf dequantizes them to."""

from __future__ import annotations

from itertools import combinations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import QUANTIZED_BY_GGUF, random_blocks
from toolkit_lm_gguf.blocks import concatenated, decode
from toolkit_lm_gguf.types import TYPES, UNREADABLE

BY_NAME = {of_type.name: of_type for of_type in TYPES.values()}
QUANTIZED = [of_type.name for of_type in TYPES.values() if of_type.is_quantized]


def raw_blocks(name: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """[rows, bytes of a row]: all codes and scales occur."""
    kind = Type[name]
    shape = rows, blocks * BY_NAME[name].block
    if kind not in QUANTIZED_BY_GGUF:
        return random_blocks(kind, shape, seed)
    weights = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return gguf.quantize(weights, kind)


def decoded(name: str, raw: np.ndarray):
    return decode(
        BY_NAME[name], torch.from_numpy(raw).view(len(raw), -1, BY_NAME[name].block_bytes)
    )


def test_all_types_are_known():
    """A type that ggml adds is either read or refused by its name."""
    known = {number: of_type.name for number, of_type in TYPES.items()} | dict(UNREADABLE)
    assert known == {kind.value: kind.name for kind in Type}
    for number, of_type in TYPES.items():
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (of_type.block, of_type.block_bytes)


@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_are_those_of_gguf_bit_for_bit(name):
    raw = raw_blocks(name, 64, 3)
    weight = decoded(name, raw)
    # Only the sign of zeros may differ.
    assert np.array_equal(weight.dequantized().numpy(), gguf.dequantize(raw, Type[name]))
    assert weight.codes.dtype is torch.uint8 and int(weight.codes.max()) < 2**weight.bits
    assert len(weight.codes.unique()) >= 2**weight.bits - 1


def test_random_bytes_are_weights_too():
    """Each bit of a block is read. NaN and infinity are among the scales."""
    for name in QUANTIZED:
        generator = np.random.default_rng(1)
        raw = generator.integers(0, 256, (32, 4 * BY_NAME[name].block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(raw, Type[name])
        assert np.array_equal(decoded(name, raw).dequantized().numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "IQ4_NL"])
def test_many_rows_are_unpacked_a_few_at_once(name):
    raw = raw_blocks(name, 2500, 1)
    assert np.array_equal(
        decoded(name, raw).dequantized().numpy(), gguf.dequantize(raw, Type[name])
    )


def test_two_types_in_one_layer_keep_their_weights():
    for names in combinations(QUANTIZED, 2):
        check_pair(names)


def check_pair(names):
    sizes = [BY_NAME[name].block for name in names]
    raws = [
        raw_blocks(name, rows, 512 // size, rows)
        for name, size, rows in zip(names, sizes, (3, 5), strict=True)
    ]
    weight = concatenated([decoded(*pair) for pair in zip(names, raws, strict=True)])
    expected = np.concatenate(
        [gguf.dequantize(raw, Type[name]) for name, raw in zip(names, raws, strict=True)]
    )
    assert np.array_equal(weight.dequantized().numpy(), expected), names
    assert int(weight.codes.max()) < 2**weight.bits
