"""B A x of adapters, by rows that have the same one. A and B lie where each adapter has them: a
table holds their addresses. Sums are in fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shrink(
    x,
    table,
    pieces,
    rows,
    low,
    count,
    inputs,
    width,
    x_row,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """A x -> low [splits, count, width], of which each holds the sum over its TILES * TILE inputs.
    Programs (pieces, PARTS * greatest rank / RANK, splits).

    table [groups, PARTS, COLUMNS] int64: the addresses of A [rank, inputs] and B [outputs, rank],
    the rank, which is a multiple of RANK, the place in `low`, the first output and the end. A rank
    of 0: the group's adapter has no such part.
    pieces [P, 3]: the group, and the first and the end of its places in `rows`, at most ROWS.
    rows [count]: rows of x, those of each group side by side.
    """
    piece = pieces + tl.program_id(0) * 3
    part = tl.program_id(1) % PARTS
    first = tl.program_id(1) // PARTS * RANK
    split = tl.program_id(2)
    entry = table + (tl.load(piece) * PARTS + part) * COLUMNS
    if first < tl.load(entry + 2):
        place = tl.load(piece + 1) + tl.arange(0, ROWS)
        is_row = place < tl.load(piece + 2)
        row = tl.load(rows + place, mask=is_row, other=0).to(tl.int64)
        rank = first + tl.arange(0, RANK)
        weight = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
        sums = tl.zeros((ROWS, RANK), tl.float32)
        for tile in range(split * TILES, split * TILES + TILES):
            k = tile * TILE + tl.arange(0, TILE)
            is_input = k < inputs
            some = tl.load(
                x + row[:, None] * x_row + k[None, :],
                mask=is_row[:, None] & is_input[None, :],
                other=0.0,
            )
            a = tl.load(
                weight + rank.to(tl.int64)[None, :] * inputs + k[:, None],
                mask=is_input[:, None],
                other=0.0,
            )
            sums = tl.dot(some, a, sums, input_precision="ieee")
        at = (split * count + place).to(tl.int64) * width + tl.load(entry + 3)
        tl.store(low + at[:, None] + rank[None, :], sums, mask=is_row[:, None])


@triton.jit
def expand(
    low,
    table,
    pieces,
    rows,
    scales,
    out,
    count,
    outputs,
    width,
    splits,
    out_row,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> None:
    """out [rows, outputs] += B low, times the group's scale [groups]. Programs (pieces, outputs /
    OUTPUTS). The rest is as of `shrink`."""
    piece = pieces + tl.program_id(0) * 3
    group = tl.load(piece)
    place = tl.load(piece + 1) + tl.arange(0, ROWS)
    is_row = place < tl.load(piece + 2)
    begin = tl.program_id(1) * OUTPUTS
    output = begin + tl.arange(0, OUTPUTS)
    scale = tl.load(scales + group)
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    touched = 0
    for part in tl.static_range(PARTS):
        entry = table + (group * PARTS + part) * COLUMNS
        first = tl.load(entry + 4)
        end = tl.load(entry + 5)
        rank = tl.load(entry + 2)
        if (first < begin + OUTPUTS) & (begin < end):
            touched += 1
            high = tl.load(entry + 1).to(tl.pointer_type(out.dtype.element_ty))
            is_output = (output >= first) & (output < end)
            for start in range(0, rank, RANK):
                k = start + tl.arange(0, RANK)
                at = place.to(tl.int64) * width + tl.load(entry + 3)
                some = tl.zeros((ROWS, RANK), tl.float32)
                for split in range(splits):
                    some += tl.load(
                        low + split * count.to(tl.int64) * width + at[:, None] + k[None, :],
                        mask=is_row[:, None],
                        other=0.0,
                    )
                b = tl.load(
                    high + (output - first)[None, :] * rank + k[:, None],
                    mask=is_output[None, :],
                    other=0.0,
                )
                sums = tl.dot(
                    (some * scale).to(out.dtype.element_ty), b, sums, input_precision="ieee"
                )
    if touched > 0:
        row = tl.load(rows + place, mask=is_row, other=0).to(tl.int64)
        at = out + row[:, None] * out_row + output[None, :]
        mask = is_row[:, None] & (output < outputs)[None, :]
        sums += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, sums.to(out.dtype.element_ty), mask=mask)
