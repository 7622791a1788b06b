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
    pieces,
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
    E2M1: tl.constexpr,
) -> None:
    """x W^T + bias for x [rows, inputs] -> out [splits, rows, outputs], of which each holds the
    sum over its share of the inputs. Programs (outputs / OUTPUTS, rows / ROWS, splits).

    codes [outputs, codes_row]: a byte for each input; PACKED: for inputs i and i + TILE of each run
    of 2 * TILE. Rows are filled up to whole runs. scales, zeros and mins [G, outputs]: `GROUP`
    inputs of a run share a row, and it is a multiple of TILE; 0: all of them do. With `groups`
    [inputs], it names each input's row instead.

    values: the value of each code. Without them it is the code; ZERO is its zero without `zeros`.
    E2M1: codes are numbers of 4 bits.
    x_scales [rows, inputs / TILE]: x has codes of 8 bits, and so has W, signed.

    pieces [P, 3]: W of several experts lie one after the other, and so do their scales, zeros, mins
    and biases. Each piece is an expert, its first row and the end of its rows, at most ROWS of them
    or none. Programs are (outputs / OUTPUTS, P, splits).
    """
    first_row = tl.program_id(1) * ROWS
    if pieces is not None:
        piece = pieces + tl.program_id(1) * 3
        expert = tl.load(piece).to(tl.int64)
        first_row = tl.load(piece + 1)
        rows_end = tl.load(piece + 2)
        codes += expert * outputs * codes_row
        its_scales = expert * outputs
        if GROUP:
            its_scales *= inputs // GROUP
        scales += its_scales
        if zeros is not None:
            zeros += its_scales
        if mins is not None:
            mins += its_scales
        if bias is not None:
            bias += expert * outputs
    else:
        rows_end = rows
    row = first_row + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(2)
    is_row = row < rows_end
    is_output = output < outputs
    k = tl.arange(0, TILE)
    halves: tl.constexpr = 2 if PACKED else 1
    at_row = row.to(tl.int64)[:, None]
    at_output = output.to(tl.int64)[None, :]
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    first = split * tiles_of_split
    # Scales come a tile before they are used, or once for all: no product waits for them.
    if groups is None:
        scale_0 = _scales_at(scales, first * halves * TILE, inputs, outputs, output, GROUP)
        scale_1 = scale_0
        if PACKED and GROUP:
            scale_1 = _scales_at(scales, (first * 2 + 1) * TILE, inputs, outputs, output, GROUP)
    end = tl.minimum(first + tiles_of_split, tl.cdiv(codes_row, TILE))
    if pieces is not None:
        end = tl.where(first_row < rows_end, end, first)
    for tile in range(first, end):
        if groups is None:
            next_0 = scale_0
            next_1 = scale_1
            if GROUP:
                after = (tile + 1) * halves * TILE
                next_0 = _scales_at(scales, after, inputs, outputs, output, GROUP)
                if PACKED:
                    next_1 = _scales_at(scales, after + TILE, inputs, outputs, output, GROUP)
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
            if groups is not None:
                scale = tl.load(scales + at, mask=has_scale, other=0.0).to(tl.float32)
            elif half == 0:
                scale = scale_0
            else:
                scale = scale_1
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
                elif E2M1:
                    value = _e2m1(code)
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
        if groups is None:
            scale_0 = next_0
            scale_1 = next_1
    is_stored = is_row[:, None] & is_output[None, :]
    if bias is not None:
        added = tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
        sums += tl.where(split == 0, added, 0.0)[None, :]
    place = (split.to(tl.int64) * rows + at_row) * outputs + at_output
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=is_stored)


@triton.jit
def _scales_at(scales, start, inputs, outputs, output, GROUP: tl.constexpr):
    """Scales [1, OUTPUTS] of the inputs from `start` on, in float32."""
    at = output
    if GROUP:
        # The last of a run of tiles may have no inputs.
        at += tl.minimum(start, inputs - 1) // GROUP * outputs
    return tl.load(scales + at, mask=output < outputs, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _e2m1(code):
    """The values 0, 0.5, 1, 1.5, 2, 3, 4, 6 of codes from 0 on, and their negatives from 8 on."""
    # Two bits of the exponent and one of the mantissa, at their places in float32.
    bits = code.to(tl.int32)
    bits = ((bits & 7) << 22) | ((bits & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def dequantize(
    codes,
    scales,
    zeros,
    mins,
    values,
    groups,
    out,
    inputs,
    outputs,
    codes_row,
    first,
    count,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    E2M1: tl.constexpr,
) -> None:
    """The weight of `count` outputs from `first` on -> out [count, inputs]. Programs (count /
    OUTPUTS, tiles). Other arguments are those of `product`."""
    place = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    output = first + place
    tile = tl.program_id(1)
    is_output = place < count
    k = tl.arange(0, TILE)
    halves: tl.constexpr = 2 if PACKED else 1
    packed = tl.load(
        codes + output.to(tl.int64)[:, None] * codes_row + tile * TILE + k[None, :],
        mask=is_output[:, None],
        other=0,
    )
    for half in tl.static_range(halves):
        start = (tile * halves + half) * TILE
        is_input = start + k < inputs
        code = packed
        if PACKED:
            code = (packed >> (4 * half)) & 15
        # Where the scales of a tile are: [OUTPUTS, 1], or [OUTPUTS, TILE].
        if groups is not None:
            group = tl.load(groups + start + k, mask=is_input, other=0)[None, :]
            has_scale = is_input[None, :] & is_output[:, None]
        else:
            group = tl.minimum(start, inputs - 1) // GROUP if GROUP else 0
            has_scale = is_output[:, None]
        at = group * outputs + output[:, None]
        if values is not None:
            value = tl.load(values + code.to(tl.int32))
        elif E2M1:
            value = _e2m1(code)
        else:
            value = code.to(tl.float32)
        if zeros is not None:
            value -= tl.load(zeros + at, mask=has_scale, other=0.0).to(tl.float32)
        elif ZERO:
            value -= ZERO
        value *= tl.load(scales + at, mask=has_scale, other=0.0).to(tl.float32)
        if mins is not None:
            value -= tl.load(mins + at, mask=has_scale, other=0.0)
        tl.store(
            out + place.to(tl.int64)[:, None] * inputs + start + k[None, :],
            value.to(out.dtype.element_ty),
            mask=is_output[:, None] & is_input[None, :],
        )


@triton.jit
def quantize_rows(
    x, codes, scales, inputs, x_row, TILE: tl.constexpr, GREATEST: tl.constexpr
) -> None:
    """x [R, inputs] -> codes [R, inputs], and their scales [R, inputs / TILE] float32. Programs (R,
    inputs / TILE). GREATEST: the greatest code, 127 of int8 or 448 of float8_e4m3fn."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    k = tile * TILE + tl.arange(0, TILE)
    is_input = k < inputs
    part = tl.load(x + row * x_row + k, mask=is_input, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(part), 0), GREATEST * 1.0)
    scaled = tl.div_rn(part, tl.where(scale == 0.0, 1.0, scale))
    # A row with NaN gives NaN.
    scale = tl.where(tl.sum((part != part).to(tl.int32), 0) > 0, float("nan"), scale)
    if GREATEST == 127:
        # Adding 1.5 * 2^23 leaves no bits behind the point: the nearest, even among equals.
        scaled = (scaled + 12582912.0) - 12582912.0
    tl.store(codes + row * inputs + k, scaled.to(codes.dtype.element_ty), mask=is_input)
    tl.store(scales + row * tl.num_programs(1) + tile, scale)
