"""Measures products of quantized weights: the kernels `triton` against PyTorch's products of bf16,
and its own of int4.

usage: python -m gpu_kit.quantized [--quick] [--tune [--seconds 60]]

Each product is checked against the weight's floats, and timed for one row and for many. --quick
checks small ones of PyTorch on a CPU. --tune times sizes of the kernel's programs, and tells the
best for each number of rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gpu_kit.report import MissedError, RefusedError, checking, die_with_the_kit

GROUP = 128
ROWS = 1, 16, 64, 1024
TUNED_ROWS = 1, 16, 64, 128
EXPERTS = 16
EXPERT_ROWS = 4, 64, 512
"""Rows of all experts together."""
BEST = 4
"""Sizes that are told, the fastest first."""
ROUNDS = 20
COPIES = 4
"""Weights that a round reads one after another: together they are more than a card's cache."""
WEIGHTS: dict[str, dict[str, Any]] = {
    "int4 of groups": {"bits": 4, "groups": GROUP},
    "int8 of groups": {"bits": 8, "groups": GROUP},
    "int8 of outputs": {"bits": 8},
    "MXFP4": {"bits": 4, "groups": 32, "is_table": True},
    "float8 of outputs": {"is_float": True},
}
EXPERTS_OF = "MXFP4", "int4 of groups", "int8 of outputs"
TUNED = "int4 of groups", "MXFP4", "int8 of groups"
FAULT = 0.05
"""Most relative error of a product: rounding x to float8 makes the most of it."""


def make_weight(
    size: int,
    device: str,
    bits: int = 8,
    groups: int = 0,
    is_table: bool = False,
    is_float: bool = False,
) -> Any:
    """A QuantizedWeight [size, size]. `groups`: inputs of a group; 0: all."""
    import torch
    from toolkit_lm.model import QuantizedWeight

    codes = torch.randint(0, 2**bits, (size, size), dtype=torch.uint8, device=device)
    if is_float:
        codes = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor([*half, *(-value for value in half)], device=device)
    return QuantizedWeight(
        codes=codes,
        bits=bits,
        scales=torch.rand(size, size // (groups or size), device=device).add_(0.1),
        values=table if is_table else None,
    )


def microseconds(device: str, products: Sequence[Callable[[], Any]]) -> float:
    """Time of one product: the least of some rounds over all. On a card they are replayed as one
    graph, so that launches by the host do not count."""
    import torch

    def all_of_them() -> None:
        for product in products:
            product()

    all_of_them()
    all_of_them()
    replay: Callable[[], Any] = all_of_them
    synchronize: Callable[[], Any] = int
    if device == "cuda":
        synchronize = torch.cuda.synchronize
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_of_them()
        replay = graph.replay
    least = float("inf")
    for _ in range(ROUNDS):
        synchronize()
        begun = time.perf_counter()
        replay()
        synchronize()
        least = min(least, time.perf_counter() - begun)
    return round(1e6 * least / len(products), 1)


def make_kernels(device: str) -> Any:
    from toolkit_lm.model import Kernels

    if device != "cuda":
        return Kernels()
    from toolkit_lm_triton.layers import TritonKernels

    return TritonKernels()


def make_methods(
    name: str, device: str, size: int, count: int = COPIES
) -> tuple[list[Any], list[Any]]:
    """Some weights of one kind, and their linear methods."""
    import torch
    from toolkit_lm.model import LinearSpec, Shard

    weights = [make_weight(size, device, **WEIGHTS[name]) for _ in range(count)]
    spec = LinearSpec(
        kind="linear",
        prefix="layer",
        inputs=Shard.whole(size),
        outputs=(Shard.whole(size),),
        dtype=torch.bfloat16,
    )
    kernels = make_kernels(device)
    return weights, [kernels.quantized_method(spec, weight) for weight in weights]


def candidates(rows: int) -> list[tuple[int, int, int, int, int]]:
    """Fields of `Choice` for a number of rows. Those that differ in splits alone are compiled
    once."""
    filled = max(16, rows)
    programs = [(32, 4, 3), (64, 4, 3), (64, 4, 5), (128, 8, 3), (16, 2, 4), (128, 4, 4)]
    splits = (4, 8, 16) if rows <= 16 else (1, 2, 4)
    return [
        (filled, outputs, split, warps, stages)
        for outputs, warps, stages in programs
        for split in splits
    ]


def tune(name: str, device: str, size: int, end: float) -> None:
    """Times sizes of programs for one kind of weight, until the time `end`."""
    import torch
    from toolkit_lm_triton import quantized

    _, methods = make_methods(name, device, size)
    chosen = quantized.choose
    for rows in TUNED_ROWS:
        x = torch.randn(rows, size, device=device).bfloat16()
        products = [lambda x=x, method=method: method.multiply(x, None) for method in methods]
        times: dict[str, float] = {}
        with checking(f"sizes of programs for {name}, {rows} rows") as found:
            found["own_us"] = microseconds(device, products)
            for sizes in candidates(rows):
                if time.monotonic() > end:
                    break
                quantized.choose = lambda *_, sizes=sizes: quantized.Choice(*sizes)
                try:
                    times[" ".join(map(str, sizes))] = microseconds(device, products)
                except Exception as error:  # What does not fit is no candidate.
                    found.setdefault("refused", {})[" ".join(map(str, sizes))] = str(error)[:60]
                finally:
                    quantized.choose = chosen
            found["tried"] = len(times)
            found["best_us"] = dict(sorted(times.items(), key=lambda pair: pair[1])[:BEST])


def measure(name: str, device: str, size: int, found: dict[str, Any]) -> None:
    """One kind of weight, with each number of rows."""
    import torch

    weights, methods = make_methods(name, device, size)
    found["method"] = type(methods[0]).__name__
    dense = [weight.dequantized().bfloat16() for weight in weights]
    for rows in ROWS:
        x = torch.randn(rows, size, device=device).bfloat16()
        exact = x.float() @ weights[0].dequantized().T
        error = float((methods[0].multiply(x, None) - exact).norm() / exact.norm())
        if not error <= FAULT:
            raise MissedError(f"{rows} rows are off by {error:.3f} of the product")
        found[f"error_{rows}"] = round(error, 5)
        found[f"us_{rows}"] = microseconds(
            device, [lambda x=x, method=method: method.multiply(x, None) for method in methods]
        )
        found[f"bf16_us_{rows}"] = microseconds(
            device, [lambda x=x, w=w: torch.nn.functional.linear(x, w) for w in dense]
        )
        if name == "int4 of groups" and device == "cuda":
            found[f"torch_int4_us_{rows}"] = microseconds(
                device, [of_torch(x, weight) for weight in weights]
            )


def measure_experts(name: str, device: str, size: int, found: dict[str, Any]) -> None:
    """A layer's experts of one kind of weight, by one kernel and one by one."""
    import torch

    number = COPIES if device == "cpu" else EXPERTS
    weights, methods = make_methods(name, device, size, number)
    kernels = make_kernels(device)
    grouped = kernels.group(methods)
    if grouped is None:
        raise RefusedError(f"{type(kernels).__name__} have no product of several experts")
    for rows in EXPERT_ROWS:
        x = torch.randn(rows, size, device=device).bfloat16()
        ends = torch.randint(0, rows + 1, (number,), device=device).sort()[0].int()
        ends[-1] = rows
        at = [0, *ends.tolist()]
        exact = torch.cat(
            [
                x[at[i] : at[i + 1]].float() @ weight.dequantized().T
                for i, weight in enumerate(weights)
            ]
        )
        error = float((grouped(x, ends, None) - exact).norm() / exact.norm())
        if not error <= FAULT:
            raise MissedError(f"{rows} rows are off by {error:.3f} of the product")
        found[f"error_{rows}"] = round(error, 5)
        found[f"us_{rows}"] = microseconds(device, [lambda x=x, ends=ends: grouped(x, ends, None)])
        products = [
            partial(method.multiply, x[at[i] : at[i + 1]], None)
            for i, method in enumerate(methods)
            if at[i] < at[i + 1]
        ]
        each = microseconds(device, products)
        found[f"one_by_one_us_{rows}"] = round(each * len(products), 1)


def of_torch(x: Any, weight: Any) -> Callable[[], Any]:
    """PyTorch's own product of int4. Its zeros are those of codes from 0 to 15."""
    import torch

    codes = (weight.codes[:, ::2] << 4) | weight.codes[:, 1::2]
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = weight.scales.T.bfloat16()
    scales_and_zeros = torch.stack([scales, torch.zeros_like(scales)], dim=2).contiguous()
    return lambda: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales_and_zeros)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0, help="of --tune")
    args = parser.parse_args()
    die_with_the_kit()
    device, size = ("cpu", GROUP) if args.quick else ("cuda", 8192)
    if args.tune:
        end = time.monotonic() + args.seconds
        for number, name in enumerate(TUNED):
            share = (end - time.monotonic()) / (len(TUNED) - number)
            if device == "cpu":
                with checking(f"sizes of programs for {name}"):
                    raise RefusedError("programs are sized on a card")
            else:
                tune(name, device, size, time.monotonic() + share)
        return
    for name in WEIGHTS:
        with checking(f"products of {name}") as found:
            measure(name, device, size, found)
    for name in EXPERTS_OF:
        with checking(f"experts of {name}") as found:
            measure_experts(name, device, size // 4, found)


if __name__ == "__main__":
    main()
