"""Codes of quantized caches, of all numbers in bfloat16."""

from __future__ import annotations

import pytest
import torch
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


@pytest.mark.parametrize("code", [INT8, E4M3])
@pytest.mark.parametrize(
    ("isa", "dtype"), [(isa, dtype) for isa, types in KERNELS.items() for dtype in types]
)
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
