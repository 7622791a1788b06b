"""Products of quantized weights, whose codes become numbers in registers, tile by tile. Sums are in
fp32, or in int32 within a group."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(
    x,
    x_scales,
    codes,
    scales,
    zeros,
    mins,
    values,
    groups,
    bias,
    out,
    rows,
    inputs,
    outputs,
    x_row,
    codes_row,
    tiles_of_split,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> None:
    """x W^T + bias for x [rows, inputs] -> out [splits, rows, outputs], of which each holds the
    sum over its share of the inputs. Programs (outputs / OUTPUTS, rows / ROWS, splits).

    codes [outputs, codes_row]: a byte for each input; PACKED: for inputs i and i + TILE of each run
    of 2 * TILE. Rows are filled up to whole runs. scales, zeros and mins [G, outputs]: `GROUP`
    inputs of a run share a row, and it is a multiple of TILE; 0: all of them do. With `groups`
    [inputs], it names each input's row instead.

    values: the value of each code. Without them it is the code; ZERO is its zero without `zeros`.
    x_scales [rows, inputs / TILE]: x has codes of 8 bits, and so has W, signed.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(2)
    is_row = row < rows
    is_output = output < outputs
    k = tl.arange(0, TILE)
    halves: tl.constexpr = 2 if PACKED else 1
    at_row = row.to(tl.int64)[:, None]
    at_output = output.to(tl.int64)[None, :]
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    first = split * tiles_of_split
    for tile in range(first, tl.minimum(first + tiles_of_split, tl.cdiv(codes_row, TILE))):
        packed = tl.load(
            codes + at_output * codes_row + tile * TILE + k[:, None],
            mask=is_output[None, :],
            other=0,
        )
        for half in tl.static_range(halves):
            start = (tile * halves + half) * TILE
            is_input = start + k < inputs
            part = tl.load(
                x + at_row * x_row + start + k[None, :],
                mask=is_row[:, None] & is_input[None, :],
                other=0.0,
            )
            code = packed
            if PACKED:
                code = (packed >> (4 * half)) & 15
            # Where the scales of a tile are: [1, OUTPUTS], or [TILE, OUTPUTS].
            if groups is not None:
                group = tl.load(groups + start + k, mask=is_input, other=0)[:, None]
                has_scale = is_input[:, None] & is_output[None, :]
            else:
                # The last of a run of tiles may have no inputs.
                group = tl.minimum(start, inputs - 1) // GROUP if GROUP else 0
                has_scale = is_output[None, :]
            at = group * outputs + output[None, :]
            scale = tl.load(scales + at, mask=has_scale, other=0.0).to(tl.float32)
            if x_scales is not None:
                x_scale = tl.load(
                    x_scales + at_row * tl.cdiv(inputs, TILE) + start // TILE,
                    mask=is_row[:, None],
                    other=0.0,
                )
                sums += tl.dot(part, code, out_dtype=tl.int32).to(tl.float32) * (x_scale * scale)
            else:
                if values is not None:
                    value = tl.load(values + code.to(tl.int32))
                else:
                    value = code.to(tl.float32)
                if zeros is not None:
                    value -= tl.load(zeros + at, mask=has_scale, other=0.0).to(tl.float32)
                elif ZERO:
                    value -= ZERO
                if mins is not None:
                    least = tl.load(mins + at, mask=has_scale, other=0.0)
                if groups is not None:
                    value *= scale
                    if mins is not None:
                        value -= least
                    sums += tl.dot(part, value.to(part.dtype), input_precision="ieee")
                else:
                    # Scaled after the product: whole numbers lose nothing in 16 bits.
                    sums += tl.dot(part, value.to(part.dtype), input_precision="ieee") * scale
                    if mins is not None:
                        sums -= tl.sum(part.to(tl.float32), 1)[:, None] * least
    is_stored = is_row[:, None] & is_output[None, :]
    if bias is not None:
        added = tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
        sums += tl.where(split == 0, added, 0.0)[None, :]
    place = (split.to(tl.int64) * rows + at_row) * outputs + at_output
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=is_stored)


@triton.jit
def quantize_rows(x, codes, scales, inputs, x_row, TILE: tl.constexpr) -> None:
    """x [R, inputs] -> codes [R, inputs] int8, and their scales [R, inputs / TILE] float32.
    Programs (R, inputs / TILE)."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    k = tile * TILE + tl.arange(0, TILE)
    is_input = k < inputs
    part = tl.load(x + row * x_row + k, mask=is_input, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(part), 0), 127.0)
    scaled = tl.div_rn(part, tl.where(scale == 0.0, 1.0, scale))
    # A row with NaN gives NaN.
    scale = tl.where(tl.sum((part != part).to(tl.int32), 0) > 0, float("nan"), scale)
    # Adding 1.5 * 2^23 leaves no bits behind the point: the nearest, even among equals.
    whole = (scaled + 12582912.0) - 12582912.0
    tl.store(codes + row * inputs + k, whole.to(tl.int8), mask=is_input)
    tl.store(scales + row * tl.num_programs(1) + tile, scale)
