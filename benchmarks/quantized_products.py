"""Times of products on a CPU: of weights in the model's dtype, and in codes of 8 and 4 bits.

usage: python benchmarks/quantized_products.py [--rows 1,4,8,16,32,128,1024] [--shapes 768x2304,...]
       [--dtype bfloat16] [--rounds 15]

A shape is inputs x outputs. Each method has so many weights of it that no cache holds them. Methods
take turns, and the least time of all rounds is stated, since other processes can only lengthen it.
"""

from __future__ import annotations

import argparse
import time

import torch
from toolkit_lm.model import LinearMethod, LinearSpec, QuantizedWeight, Shard
from toolkit_lm_cpu.layers import CpuKernels
from torch import nn

BYTES = 2**26
"""Of the weights of a method, at least."""
METHODS = {"int8": (8, 0), "int8 g128": (8, 128), "int4 g128": (4, 128), "int4 g32": (4, 32)}


def make_spec(inputs: int, outputs: int, dtype: torch.dtype) -> LinearSpec:
    return LinearSpec(
        kind="linear",
        prefix="layer",
        inputs=Shard.whole(inputs),
        outputs=(Shard.whole(outputs),),
        dtype=dtype,
    )


def make_plain(kernels: CpuKernels, spec: LinearSpec) -> LinearMethod:
    method = kernels.linear_method(spec)
    layer = nn.Module()
    method.create(layer, spec)
    layer.weight.data.normal_(std=0.05)
    method.process(layer)
    return method


def make_quantized(kernels: CpuKernels, spec: LinearSpec, bits: int, group: int) -> LinearMethod:
    outputs, inputs = spec.shape
    return kernels.quantized_method(
        spec,
        QuantizedWeight(
            codes=torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8),
            bits=bits,
            scales=torch.rand(outputs, inputs // (group or inputs)).half().float(),
        ),
    )


def make_all(inputs: int, outputs: int, dtype: torch.dtype) -> dict[str, list[LinearMethod]]:
    """So many methods of each kind that all weights of a kind have BYTES."""
    kernels = CpuKernels()
    spec = make_spec(inputs, outputs, dtype)
    size = inputs * outputs
    made = {
        str(dtype).removeprefix("torch."): [
            make_plain(kernels, spec) for _ in range(BYTES // (size * dtype.itemsize) + 1)
        ]
    }
    for name, (bits, group) in METHODS.items():
        if name != "bits":
            made[name] = [
                make_quantized(kernels, spec, bits, group)
                for _ in range(BYTES // (size * bits // 8) + 1)
            ]
    return made


def least_times(
    made: dict[str, list[LinearMethod]], x: torch.Tensor, rounds: int
) -> dict[str, float]:
    """Seconds of a product, by method."""
    least = dict.fromkeys(made, float("inf"))
    for _ in range(rounds):
        for name, methods in made.items():
            some = methods if len(x) <= 32 else methods[: max(2, 256 // len(x))]
            start = time.perf_counter()
            for method in some:
                method.multiply(x, None)
            least[name] = min(least[name], (time.perf_counter() - start) / len(some))
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,4,8,16,32,128,1024")
    parser.add_argument("--shapes", default="768x2304,2048x768,1024x3072,3072x1024")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for shape in options.shapes.split(","):
        inputs, outputs = map(int, shape.split("x"))
        made = make_all(inputs, outputs, getattr(torch, options.dtype))
        for rows in map(int, options.rows.split(",")):
            x = torch.randn(rows, inputs).to(getattr(torch, options.dtype))
            times = least_times(made, x, options.rounds)
            plain = next(iter(times.values()))
            found = ", ".join(
                f"{name} {seconds * 1e6:.0f} us ({plain / seconds:.2f}x)"
                for name, seconds in times.items()
            )
            print(f"{inputs}x{outputs}, {rows} rows: {found}", flush=True)


if __name__ == "__main__":
    main()
