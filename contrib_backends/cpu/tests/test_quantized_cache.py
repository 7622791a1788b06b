"""Codes of quantized caches: those of all numbers in bfloat16, and the numbers of all codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toolkit_lm_cpu.arguments import Rows
from toolkit_lm_cpu.library import KERNELS, _kernels, exported
from torch import Tensor

TOKENS = 16
HEADS = 8
SIZE = 512
INT8 = 1
E4M3 = 2
SCALE = 2.0

pytestmark = pytest.mark.skipif(_kernels is None, reason="there are no compiled kernels")


def expected_codes(x: Tensor, code: int) -> Tensor:
    scaled = x.float() / SCALE
    if code == INT8:
        return (scaled.clamp(-127, 127).round() + 128).nan_to_num(128).to(torch.uint8)
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


ALL = [(isa, dtype) for isa, types in KERNELS.items() for dtype in types]


@pytest.mark.parametrize("code", [INT8, E4M3])
@pytest.mark.parametrize(("isa", "dtype"), ALL)
def test_codes_are_the_nearest_of_all_numbers(isa: str, dtype: torch.dtype, code: int) -> None:
    """A scale that is given. Tokens are written one after the other: none touches another's."""
    if not _kernels.supports(isa):
        pytest.skip(f"the processor lacks {isa}")
    x = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).to(dtype)
    x = x.view(TOKENS, HEADS, SIZE)
    scale = torch.tensor(SCALE)
    keys = torch.zeros(HEADS, SIZE // 2, TOKENS, 2, dtype=torch.uint8)
    values = torch.zeros(HEADS, TOKENS // 2, SIZE, 2, dtype=torch.uint8)
    slots = torch.arange(TOKENS)
    for token in torch.randperm(TOKENS).tolist():
        _kernels.write_kv(
            KERNELS[isa][dtype],
            keys=x[token].data_ptr(),
            values=x[token].data_ptr(),
            to_keys=keys.data_ptr(),
            to_values=values.data_ptr(),
            key_stride=HEADS * SIZE,
            value_stride=HEADS * SIZE,
            key_page=keys.numel(),
            value_page=values.numel(),
            slots=slots[token:].data_ptr(),
            tokens=1,
            kv_heads=HEADS,
            size=SIZE,
            block_size=exported("TILE"),
            code=code,
            key_scales=scale.data_ptr(),
            value_scales=scale.data_ptr(),
            scale_page=0,
        )
    expected = expected_codes(x, code)
    assert torch.equal(keys.permute(2, 0, 1, 3).reshape(x.shape), expected)
    assert torch.equal(values.permute(1, 3, 0, 2).reshape(x.shape), expected)


def numbers(codes: Tensor, code: int) -> Tensor:
    """The numbers that codes stand for."""
    if code == INT8:
        return codes.float() - 128
    return codes.view(torch.float8_e4m3fn).float()


def attend(
    isa: str, query: Tensor, keys: Tensor, values: Tensor, code: int, key_scales: Tensor
) -> Tensor:
    """Attention of one token over a tile of one KV head: query [heads, size], codes of keys and
    values [16, size], scales of keys [16] -> [heads, size]. Values have the scale SCALE."""
    heads, size = query.shape
    # Pairs of elements, and pairs of tokens, lie together.
    keys = keys.view(TOKENS, size // 2, 2).transpose(0, 1).contiguous()
    values = values.view(TOKENS // 2, 2, size).transpose(1, 2).contiguous()
    value_scales = torch.full((TOKENS,), SCALE)
    starts = np.array([0, 1], np.int32)
    seen = np.array([TOKENS], np.int32)
    first = np.array([TOKENS - 1], np.int64)
    table = np.zeros(1, np.int32)
    out = torch.empty_like(query)
    at = [array.ctypes.data for array in (starts, seen, first, seen)]
    _kernels.attend(
        KERNELS[isa][query.dtype],
        Rows(*at, 1, table.ctypes.data, 1),
        queries=query.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        out=out.data_ptr(),
        query_stride=heads * size,
        key_stride=keys.numel(),
        value_stride=values.numel(),
        out_stride=heads * size,
        block_tiles=1,
        heads=heads,
        kv_heads=1,
        size=size,
        real=size,
        scale=1.0,
        soft_cap=0.0,
        window=0,
        sight=exported("SEE_PAST"),
        sinks=0,
        bias=0,
        bias_keys=0,
        bias_center=-1,
        spans=0,
        code=code,
        key_scales=key_scales.data_ptr(),
        value_scales=value_scales.data_ptr(),
        scale_page=TOKENS,
    )
    return out


@pytest.mark.parametrize("code", [INT8, E4M3])
@pytest.mark.parametrize(("isa", "dtype"), ALL)
def test_values_are_the_numbers_of_their_codes(isa: str, dtype: torch.dtype, code: int) -> None:
    """Exactly, wherever a token lies in a tile: of each token in turn, whose weight is 1. Code 0 of
    int8, -128, is never written."""
    if not _kernels.supports(isa):
        pytest.skip(f"the processor lacks {isa}")
    codes = torch.arange(256, dtype=torch.uint8).clamp(min=1 if code == INT8 else 0)
    exact = numbers(codes, code)
    safe = torch.where(exact.isnan(), torch.zeros_like(codes), codes)
    # Any code but that of zero.
    keys = torch.full((TOKENS, 256), 200 if code == INT8 else 0x78, dtype=torch.uint8)
    query = torch.ones(1, 256, dtype=dtype)
    for token in range(TOKENS):
        values = safe.roll(7).repeat(TOKENS, 1)
        values[token] = codes
        scales = torch.zeros(TOKENS)
        scales[token] = 1
        found = attend(isa, query, keys, values, code, scales)[0]
        assert torch.equal(found.isnan(), exact.isnan())
        assert torch.equal(found.float().nan_to_num(), (exact * SCALE).nan_to_num())


@pytest.mark.parametrize("code", [INT8, E4M3])
@pytest.mark.parametrize(("isa", "dtype"), ALL)
def test_keys_are_the_numbers_of_their_codes(isa: str, dtype: torch.dtype, code: int) -> None:
    """Element d of a token's key is the score of head d: sixteen heads see all codes."""
    if not _kernels.supports(isa):
        pytest.skip(f"the processor lacks {isa}")
    size = 64
    zero, one = (128, 129) if code == INT8 else (0, 0x38)
    codes = torch.arange(256, dtype=torch.uint8).clamp(min=1 if code == INT8 else 0)
    exact = numbers(codes, code)
    codes = torch.where(exact.isnan(), torch.full_like(codes, zero), codes).view(TOKENS, 16)
    keys = torch.full((TOKENS, size), zero, dtype=torch.uint8)
    keys[:, :16] = codes
    values = torch.full((TOKENS, size), zero, dtype=torch.uint8)
    values[:, :TOKENS] = torch.where(torch.eye(TOKENS) == 1, one, zero).to(torch.uint8)
    query = torch.eye(16, size, dtype=dtype)
    for scale in (1 / 64, 1.0, 64.0):
        found = attend(isa, query, keys, values, code, torch.full((TOKENS,), scale))
        weights = (numbers(codes, code) * scale).softmax(0).T
        torch.testing.assert_close(
            found[:, :TOKENS].float(), weights * SCALE, atol=2e-2, rtol=0, msg=f"scale {scale}"
        )
