"""What compressed-tensors itself packs is unpacked to the same codes and values."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.mx_utils import compress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from toolkit_lm_quantization_formats.codes import E2M1, powers_of_two, unpack


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("columns", [32, 75, 128])
def test_integers_packed_along_the_inputs_and_the_outputs(bits, columns):
    codes = torch.randint(0, 2**bits, (24, columns), dtype=torch.uint8)
    values = (codes.int() - 2 ** (bits - 1)).to(torch.int8)
    along_inputs = pack_to_int32(values, bits)
    assert torch.equal(unpack(along_inputs, bits)[:, :columns], codes)
    along_outputs = pack_to_int32(values, bits, packed_dim=0)
    assert torch.equal(unpack(along_outputs.T, bits)[:, :24].T, codes)


def test_floats_of_4_bits():
    table = torch.tensor(E2M1)
    values = table[torch.randint(0, 16, (24, 64))]
    assert torch.equal(table[unpack(pack_fp4_to_uint8(values), 4).int()], values)


def test_scales_that_are_powers_of_two():
    scales = torch.exp2(torch.arange(-100, 100).float())[:, None]
    assert torch.equal(powers_of_two(compress_mx_scale(scales, torch.uint8)), scales)
