"""Measures the cost of moving KV blocks between the device and host memory, by their layout.

usage: python benchmarks/kv_blocks.py [--device cpu] [--rounds 7]

A block is a page for each layer of its KV group. *Gather*: a buffer [blocks, page_bytes] per layer,
so that a block is gathered from all of them, in a call each. *Whole*: one buffer [layers, blocks,
page_bytes], as the cache has it: a layer is one piece, and a block is copied in one call. *Region*:
one buffer [blocks, layers, page_bytes], so that a block is one piece, and a layer a strided view.
Three things are measured: blocks, in any order, out to bytes of the host and back; and what a
layer's attention pays for the stride, as a copy of the layer's pages of a sequence, in order of its
table. Rounds take turns; shown is the median. Figures count only on a machine that does nothing
else.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_BYTES = 256 * 2**20
"""Bytes of a cache, larger than any processor's cache."""
_MOVED = 64
"""Blocks, in one go."""


class Shape(NamedTuple):
    """Pages of a model, in blocks of 16 tokens."""

    name: str
    layers: int
    page_bytes: int


SHAPES = [
    Shape("2 layers, 2 KV heads of 32, float32", 2, 2 * 16 * 2 * 32 * 4),
    Shape("24 layers, 2 KV heads of 64, bfloat16", 24, 2 * 16 * 2 * 64 * 2),
    Shape("32 layers, 8 KV heads of 128, bfloat16", 32, 2 * 16 * 8 * 128 * 2),
    Shape("61 layers, a latent of 576, bfloat16", 61, 16 * 576 * 2),
]


def main() -> None:
    """Prints a table for each shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"{options.device}, {torch.get_num_threads()} threads; GB/s, the median of each")
    for shape in SHAPES:
        block_bytes = shape.layers * shape.page_bytes
        print(f"\n{shape.name}: pages of {shape.page_bytes:,} bytes, blocks of {block_bytes:,}")
        print(f"{'':10}{'out':>8}{'back':>8}{'attend':>8}")
        for name, rates in measure(shape, torch.device(options.device), options.rounds).items():
            print(f"{name:10}" + "".join(f"{rate / 1e9:8.2f}" for rate in rates))


def measure(shape: Shape, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Bytes per second, by layout: out, back, a layer's pages."""
    num_blocks = max(_MOVED, _BYTES // (shape.layers * shape.page_bytes))
    region = torch.zeros(
        (num_blocks, shape.layers, shape.page_bytes), dtype=torch.uint8, device=device
    )
    layers = torch.zeros_like(region.transpose(0, 1).contiguous())
    blocks = {"whole": layers.transpose(0, 1), "region": region}
    layouts = {
        "gather": [torch.zeros_like(region[:, 0]).contiguous() for _ in range(shape.layers)],
        "whole": [*layers],
        "region": [region[:, layer] for layer in range(shape.layers)],
    }
    pinned = device.type == "cuda"
    host = torch.zeros((_MOVED, shape.layers, shape.page_bytes), dtype=torch.uint8)
    host = host.pin_memory() if pinned else host
    table = random.Random(0).sample(range(num_blocks), _MOVED)
    read = torch.zeros((_MOVED, shape.page_bytes), dtype=torch.uint8, device=device)
    moved = _MOVED * shape.layers * shape.page_bytes
    cases: dict[str, list[tuple[int, Callable[[], None]]]] = {}
    for name, pages in layouts.items():
        whole = blocks.get(name)
        cases[name] = [
            (moved, lambda pages=pages, whole=whole: out(pages, whole, table, host)),
            (moved, lambda pages=pages, whole=whole: back(pages, whole, table, host)),
            (
                _MOVED * shape.page_bytes * shape.layers,
                lambda pages=pages: attend(pages, table, read),
            ),
        ]
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds + 1):
        for name, calls in cases.items():
            for index, (_, call) in enumerate(calls):
                seconds.setdefault((name, index), []).append(timed(call, device))
    return {
        name: [
            size / statistics.median(seconds[name, index][1:])
            for index, (size, _) in enumerate(calls)
        ]
        for name, calls in cases.items()
    }


def out(pages: list[Tensor], blocks: Tensor | None, table: list[int], host: Tensor) -> None:
    """Blocks to the host, one by one. `blocks`: [blocks, layers, page_bytes]."""
    for place, block in enumerate(table):
        if blocks is not None:
            host[place].copy_(blocks[block], non_blocking=True)
            continue
        for layer, page in enumerate(pages):
            host[place, layer].copy_(page[block], non_blocking=True)


def back(pages: list[Tensor], blocks: Tensor | None, table: list[int], host: Tensor) -> None:
    """Blocks from the host, one by one. `blocks`: [blocks, layers, page_bytes]."""
    for place, block in enumerate(table):
        if blocks is not None:
            blocks[block].copy_(host[place], non_blocking=True)
            continue
        for layer, page in enumerate(pages):
            page[block].copy_(host[place, layer], non_blocking=True)


def attend(pages: list[Tensor], table: list[int], read: Tensor) -> None:
    """Each layer's pages of a sequence are read."""
    index = torch.tensor(table, device=read.device)
    for page in pages:
        torch.index_select(page, 0, index, out=read)


def timed(call: Callable[[], None], device: torch.device) -> float:
    """Seconds that a call takes, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
