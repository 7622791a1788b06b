"""Counts the instructions of the kernels of `cpu`, case by case, in a library of them.

usage: python benchmarks/kernel_cases.py LIBRARY [--only WORD,...] [--collector LIBRARY]

Cases have fixed shapes and fixed data, run in one thread, and need neither torch nor the package. A
case whose shape changes gets another name: `kernel_counts.py` compares cases of one name.
Each is run with all instruction sets that the processor has. Without `--collector`, the processor's
counter counts, and a JSON object {case: instructions} is printed. With it, callgrind counts, and
writes a dump for each case, in their order, which is printed as the same object without counts.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any

from kernel_memory import SIZES, Memory

INPUTS = 256
OUTPUTS = 256
ROWS = (1, 32, 512)
_PERF_EVENT_OPEN = 298
_ENABLE = 0x2400
_DISABLE = 0x2401
_RESET = 0x2403
_USER_ONLY = 1 | 1 << 5 | 1 << 6
"""Disabled at first; without the system and without a hypervisor."""

Case = tuple[str, Callable[[], object]]


class PerfCounter:
    """Instructions of this thread in user mode, by the processor's counter."""

    def __init__(self) -> None:
        """Raises OSError where the system or the processor has no such counter."""
        attributes = struct.pack("<IIQQQQQ", 0, 112, 1, 0, 0, 0, _USER_ONLY).ljust(112, b"\0")
        libc = ctypes.CDLL(None, use_errno=True)
        self._file = libc.syscall(_PERF_EVENT_OPEN, attributes, 0, -1, -1, 0)
        if self._file < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def count(self, call: Callable[[], object]) -> int:
        fcntl.ioctl(self._file, _RESET)
        fcntl.ioctl(self._file, _ENABLE)
        call()
        fcntl.ioctl(self._file, _DISABLE)
        return int.from_bytes(os.read(self._file, 8), sys.byteorder)


class CallgrindCounter:
    """Instructions under valgrind, whose dumps hold the counts."""

    def __init__(self, library: str) -> None:
        self._collector = ctypes.CDLL(library)

    def count(self, call: Callable[[], object]) -> None:
        self._collector.start()
        call()
        self._collector.stop()


class Cases:
    """The cases of a library of kernels."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._memory = Memory()
        self._held: list[object] = []
        """What kernels point to."""
        self._types = [
            (number, isa, dtype, pair)
            for number, (isa, dtype, pair) in enumerate(kernels.KERNELS)
            if kernels.supports(isa)
        ]
        self._floats = [(number, isa) for number, isa, dtype, _ in self._types if _is_wide(dtype)]

    def __iter__(self) -> Iterator[Case]:
        for number, isa, dtype, pair in self._types:
            for name, case in self._of_type(number, dtype, pair):
                yield f"{name}, {dtype}, {isa}", case
        for number, isa in enumerate(self._kernels.CODE_KERNELS):
            if self._kernels.supports(isa):
                for name, case in self._of_codes(number):
                    yield f"{name}, {isa}", case
        for number, isa in self._floats:
            for name, case in self._states(number):
                yield f"{name}, float32, {isa}", case

    def _of_type(self, number: int, dtype: str, pair: int) -> Iterator[Case]:
        for rows in ROWS:
            yield f"product of {rows} rows", self._product(number, dtype, rows)
        for rows, adapters in ((1, 1), (32, 1), (32, 16)):
            name = f"product of {rows} rows, {adapters} adapters"
            yield name, self._adapted(number, dtype, rows, adapters)
        yield "product of 64 rows, 8 weights", self._grouped(number, dtype)
        yield "32 tokens, 2 of 8 experts each", self._experts(number, dtype)
        yield "packing", self._pack(number, dtype)
        yield "greedy token of a product, 8 rows", self._likeliest_output(number, dtype)
        yield "greedy token", self._likeliest(number, dtype)
        yield "soft cap", self._soft_cap(number, dtype)
        yield "attention, decode", self._attention(number, dtype, [1] * 8, 512)
        yield "attention, prefill", self._attention(number, dtype, [96], 160)
        yield (
            "attention, decode of an int8 cache",
            self._attention(number, dtype, [1] * 8, 512, code=self._kernels.AS_INT8),
        )
        yield "keys and values into the cache", self._write(number, dtype)
        yield "RMS norm", self._norm(number, dtype, has_bias=False)
        yield "layer norm", self._norm(number, dtype, has_bias=True)
        yield "embedding out of panels", self._embed(dtype)
        yield "rope", self._rotate(number, dtype)

    def _linear(self, dtype: str, rows: int, weights: int) -> dict[str, Any]:
        return {
            "weights": weights,
            "bias": 0,
            "outputs": OUTPUTS,
            "inputs": INPUTS,
            "activation": self._kernels.PLAIN,
            "is_gated": False,
            "x": self._memory.floats(dtype, rows * INPUTS),
            "x_stride": INPUTS,
            "residual": 0,
            "residual_stride": 0,
            "out": self._memory.empty(rows * OUTPUTS * 4),
            "out_stride": OUTPUTS,
            "rows": rows,
        }

    def _packing(self, dtype: str, outputs: int = OUTPUTS, inputs: int = INPUTS) -> dict[str, int]:
        return {
            "weight": self._memory.floats(dtype, outputs * inputs),
            "to": self._memory.empty(outputs * inputs * SIZES[dtype]),
            "outputs": outputs,
            "inputs": inputs,
        }

    def _pack(self, number: int, dtype: str) -> Callable[[], object]:
        arguments = self._packing(dtype)
        return partial(self._kernels.pack, number, **arguments)

    def _packed(self, number: int, dtype: str, outputs: int = OUTPUTS, inputs: int = INPUTS) -> int:
        arguments = self._packing(dtype, outputs, inputs)
        self._kernels.pack(number, **arguments)
        return arguments["to"]

    def _product(self, number: int, dtype: str, rows: int) -> Callable[[], object]:
        arguments = self._linear(dtype, rows, self._packed(number, dtype))
        return partial(self._kernels.linear, number, None, None, **arguments)

    def _adapted(self, number: int, dtype: str, rows: int, adapters: int) -> Callable[[], object]:
        """Rows have adapters by turns, of rank 16."""
        kernels = self._kernels
        rank = 16
        part = 0, 0, 0, 0, 0
        described = []
        groups = []
        for adapter in range(adapters):
            low = self._packed(number, dtype, rank, INPUTS)
            high = self._packed(number, dtype, OUTPUTS, rank), 0, OUTPUTS // 16, 0, rank
            described.append(kernels.low_rank((number, low, INPUTS, rank, high, part, part)))
            mine = list(range(adapter, rows, adapters))
            groups.append((self._memory.integers("q", mine), len(mine), 0.5))
        self._held.append(described)
        arguments = self._linear(dtype, rows, self._packed(number, dtype))
        return partial(
            kernels.linear,
            number,
            kernels.row_groups(tuple(groups), rank),
            kernels.low_ranks(tuple(described), None),
            **arguments,
        )

    def _likeliest_output(self, number: int, dtype: str) -> Callable[[], object]:
        arguments = self._linear(dtype, 8, self._packed(number, dtype)) | {"out": 0}
        arguments["out_stride"] = 0
        best = self._memory.empty(8 * 4)
        indices = self._memory.empty(8 * 8)
        return partial(self._kernels.likeliest_output, number, best, indices, **arguments)

    def _of_codes(self, kernel: int) -> Iterator[Case]:
        number = self._floats[-1][0]
        for bits in (8, 4):
            yield f"packing, int{bits}", self._pack_codes(bits)
            for rows in ROWS:
                arguments = self._quantized(bits, kernel, rows)
                product = partial(self._kernels.quantized_linear, number, None, None, **arguments)
                yield f"product of {rows} rows, int{bits}", product
            arguments = self._quantized(bits, kernel, 8) | {"out": 0, "out_stride": 0}
            results = self._memory.empty(8 * 4), self._memory.empty(8 * 8)
            likeliest = partial(self._kernels.likeliest_quantized, number, *results, **arguments)
            yield f"greedy token of a product, 8 rows, int{bits}", likeliest

    def _packing_of_codes(self, bits: int) -> dict[str, int]:
        return {
            "codes": self._memory.codes(bits, OUTPUTS * INPUTS),
            "order": 0,
            "to": self._memory.empty(OUTPUTS * INPUTS * bits // 8),
            "outputs": OUTPUTS,
            "inputs": INPUTS,
            "width": INPUTS,
            "bits": bits,
            "added": 0,
            "has_levels": False,
        }

    def _pack_codes(self, bits: int) -> Callable[[], object]:
        return partial(self._kernels.pack_codes, **self._packing_of_codes(bits))

    def _quantized(self, bits: int, kernel: int, rows: int) -> dict[str, Any]:
        """Codes of 8 bits have a scale per output, those of 4 bits one per 128 inputs."""
        group = 128
        groups = INPUTS // group
        scaled = groups if bits == 4 else 1
        packing = self._packing_of_codes(bits)
        self._kernels.pack_codes(**packing)
        fields = dict.fromkeys(self._kernels.FIELDS["Quantized"], 0) | {
            "scales": self._memory.floats("float16", OUTPUTS * scaled),
            "scaled": scaled,
            "groups": groups,
            "group": group,
            "part": group,
            "bits": bits,
            "is_half": 1,
            "kernel": kernel,
        }
        return self._linear("float32", rows, packing["to"]) | {
            "quantized": tuple(fields.values()),
            "codes": self._memory.empty(rows * groups * (group + 8) + 1),
        }

    def _embed(self, dtype: str) -> Callable[[], object]:
        """Pairs of bfloat16 lie together, as floats do."""
        width = 2 if dtype == "float16" else 4
        arguments = {
            "weights": self._memory.floats(dtype, OUTPUTS * INPUTS),
            "ids": self._memory.integers("q", list(range(0, OUTPUTS, 2))),
            "out": self._memory.empty(OUTPUTS // 2 * INPUTS * 4),
            "tokens": OUTPUTS // 2,
            "lanes": INPUTS * SIZES[dtype] // width,
            "width": width,
        }
        return partial(self._kernels.embed, OUTPUTS, **arguments)

    def _soft_cap(self, number: int, dtype: str) -> Callable[[], object]:
        x = self._memory.floats(dtype, 8 * 8192)
        return partial(self._kernels.soft_cap, number, 8, x=x, stride=8192, size=8192, cap=30.0)

    def _likeliest(self, number: int, dtype: str) -> Callable[[], object]:
        arguments = {
            "scores": self._memory.floats(dtype, 8 * 8192),
            "best": self._memory.empty(8 * 4),
            "indices": self._memory.empty(8 * 8),
            "stride": 8192,
            "size": 8192,
        }
        return partial(self._kernels.likeliest, number, 8, **arguments)

    def _cache(self, dtype: str, blocks: int, code: int) -> dict[str, int]:
        """Pages of 16 tokens with 2 heads of 64."""
        page = 2 * 16 * 64
        memory = self._memory
        content = memory.codes(8, blocks * page) if code else memory.floats(dtype, blocks * page)
        scales = memory.floats("float32", blocks * 2 * 2 * 16) if code else 0
        return {
            "at": content,
            "page": page,
            "code": code,
            "key_scales": scales,
            "value_scales": scales + 2 * 16 * 4 if code else 0,
            "scale_page": 2 * 2 * 16 if code else 0,
        }

    def _attention(
        self, number: int, dtype: str, tokens: list[int], keys: int, code: int = 0
    ) -> Callable[[], object]:
        """Rows of so many tokens, which see `keys` keys, with 8 heads over 2 of 64."""
        memory = self._memory
        rows = len(tokens)
        blocks = keys // 16
        starts = [sum(tokens[:row]) for row in range(rows + 1)]
        fields = {
            "starts": memory.integers("i", starts),
            "seen": memory.integers("i", [keys] * rows),
            "first": memory.integers("q", [keys - count for count in tokens]),
            "origins": memory.integers("i", starts[:-1]),
            "rows": rows,
            "table": memory.integers("i", list(range(rows * blocks))),
            "table_stride": blocks,
        }
        step = tuple(fields[name] for name in self._kernels.FIELDS["Rows"])
        cache = self._cache(dtype, rows * blocks, code)
        arguments = {
            "queries": memory.floats(dtype, starts[-1] * 512),
            "keys": cache["at"],
            "values": cache["at"],
            "out": memory.empty(starts[-1] * 512 * 4),
            "query_stride": 512,
            "key_stride": cache["page"],
            "value_stride": cache["page"],
            "out_stride": 512,
            "block_tiles": 1,
            "heads": 8,
            "kv_heads": 2,
            "size": 64,
            "real": 64,
            "scale": 0.125,
            "soft_cap": 0.0,
            "window": 0,
            "sight": self._kernels.SEE_PAST,
            **dict.fromkeys(("sinks", "bias", "bias_keys"), 0),
            "bias_center": -1,
            "spans": 0,
            **{name: cache[name] for name in ("code", "key_scales", "value_scales", "scale_page")},
        }
        return partial(self._kernels.attend, number, step, **arguments)

    def _write(self, number: int, dtype: str) -> Callable[[], object]:
        cache = self._cache(dtype, 8, 0)
        arguments = {
            "keys": self._memory.floats(dtype, 128 * 128),
            "values": self._memory.floats(dtype, 128 * 128),
            "to_keys": cache["at"],
            "to_values": cache["at"],
            "key_stride": 128,
            "value_stride": 128,
            "key_page": cache["page"],
            "value_page": cache["page"],
            "slots": self._memory.integers("q", list(range(128))),
            "tokens": 128,
            "kv_heads": 2,
            "size": 64,
            "block_size": 16,
            **{name: cache[name] for name in ("code", "key_scales", "value_scales", "scale_page")},
        }
        return partial(self._kernels.write_kv, number, **arguments)

    def _norm(self, number: int, dtype: str, has_bias: bool) -> Callable[[], object]:
        arguments = {
            "x": self._memory.floats(dtype, 64 * 1024),
            "residual": 0,
            "sum": 0,
            "out": self._memory.empty(64 * 1024 * 4),
            "x_stride": 1024,
            "head_stride": 0,
            "residual_stride": 0,
            "tokens": 64,
            "heads": 1,
            "size": 1024,
            "weight": self._memory.floats(dtype, 1024),
            "bias": self._memory.floats(dtype, 1024) if has_bias else 0,
            "eps": 1e-6,
            "is_wide": False,
        }
        return partial(self._kernels.norm, number, **arguments)

    def _rotate(self, number: int, dtype: str) -> Callable[[], object]:
        arguments = {
            "x": self._memory.floats(dtype, 64 * 512),
            "cos": self._memory.floats(dtype, 64 * 64),
            "sin": self._memory.floats(dtype, 64 * 64),
            "x_stride": 512,
            "head_stride": 64,
            "angle_stride": 64,
            "tokens": 64,
            "heads": 8,
            "size": 64,
        }
        return partial(self._kernels.rotate, number, **arguments)

    def _grouped(self, number: int, dtype: str) -> Callable[[], object]:
        """Each weight has 8 rows."""
        kernels = self._kernels
        rows = self._linear(dtype, 64, 0)
        plain = (0,) * len(kernels.FIELDS["Quantized"])
        weights = tuple((self._packed(number, dtype), 0, plain) for _ in range(8))
        arguments = {
            "ends": self._memory.integers("i", list(range(8, 72, 8))),
            "biases": 0,
            "bias_bytes": 0,
            "element": SIZES[dtype],
            **{name: rows[name] for name in ("x", "x_stride", "out")},
            "codes": 0,
            "code_bytes": 0,
            **{name: rows[name] for name in ("inputs", "outputs", "activation", "is_gated")},
        }
        return partial(kernels.grouped, number, kernels.group(weights), **arguments)

    def _experts(self, number: int, dtype: str) -> Callable[[], object]:
        """Each weight has 8 rows, as of `_grouped`."""
        kernels = self._kernels
        memory = self._memory
        packed = self._linear(dtype, 64, 0)
        plain = (0,) * len(kernels.FIELDS["Quantized"])
        groups = [
            kernels.group(tuple((self._packed(number, dtype, *shape), 0, plain) for _ in range(8)))
            for shape in ((OUTPUTS, INPUTS), (INPUTS, OUTPUTS))
        ]
        arguments = {
            "x": packed["x"],
            "chosen": memory.integers("q", [i % 8 for i in range(64)]),
            "weights": memory.floats("float32", 64),
            "out": memory.empty(32 * INPUTS * SIZES[dtype]),
            "x_stride": INPUTS,
            "tokens": 32,
            "top": 2,
            "first": 0,
            "hidden": INPUTS,
            "inner": OUTPUTS,
            "element": SIZES[dtype],
            **dict.fromkeys(("up_biases", "down_biases", "up_bias_bytes", "down_bias_bytes"), 0),
            "rows": memory.empty(64 * INPUTS * SIZES[dtype]),
            "between": memory.empty(64 * OUTPUTS * SIZES[dtype]),
            **dict.fromkeys(("codes", "up_code_bytes", "down_code_bytes"), 0),
            "activation": packed["activation"],
            "is_gated": packed["is_gated"],
        }
        return partial(kernels.experts, number, *groups, **arguments)

    def _states(self, number: int) -> Iterator[Case]:
        for name, rows, length in (("decode", 8, 1), ("prefill", 1, 32)):
            yield f"convolution, {name}", self._convolution(number, rows, length)
            for is_delta in (True, False):
                kind = "gated delta rule" if is_delta else "linear attention"
                yield f"{kind}, {name}", self._recurrence(number, rows, length, is_delta)
            yield f"selective scan, {name}", self._scan(number, rows, length)
        yield "latent attention, decode", self._latent(number)

    def _rows(self, rows: int, length: int, state: int) -> dict[str, int]:
        """Rows that go on from a state of so many floats."""
        memory = self._memory
        return {
            "tokens": memory.integers("q", list(range(rows * length))),
            "blocks": memory.integers("q", list(range(rows))),
            "starts": memory.integers("q", [5] * rows),
            "rows": rows,
            "length": length,
            "ring": memory.floats("float32", rows * 2 * state),
            "places": 2,
            "page": 2 * state,
        }

    def _convolution(self, number: int, rows: int, length: int) -> Callable[[], object]:
        tokens = rows * length
        arguments = self._rows(rows, length, 3 * 256) | {
            "x": self._memory.floats("float32", tokens * 256),
            "weight": self._memory.floats("float32", 4 * 256),
            "bias": 0,
            "out": self._memory.empty(tokens * 256 * 4),
            "x_stride": 256,
            "channels": 256,
            "size": 4,
            "width": 4,
            "is_bfloat16": False,
            "activation": self._kernels.SILU,
        }
        return partial(self._kernels.convolve, number, **arguments)

    def _recurrence(
        self, number: int, rows: int, length: int, is_delta: bool
    ) -> Callable[[], object]:
        tokens = rows * length
        memory = self._memory
        arguments = self._rows(rows, length, 4 * 64 * 64) | {
            **{name: memory.floats("float32", tokens * 256) for name in ("q", "k", "v")},
            "decays": memory.floats("float32", tokens * 4),
            "factors": memory.floats("float32", tokens * 4),
            "out": memory.empty(tokens * 256 * 4),
            "stride": 256,
            "heads": 4,
            "groups": 4,
            "keys": 64,
            "values": 64,
            "scale": 0.125 if is_delta else 1.0,
            "eps": 1e-6 if is_delta else -1.0,
            "is_delta": is_delta,
            "per_key": False,
        }
        return partial(self._kernels.recur, number, **arguments)

    def _scan(self, number: int, rows: int, length: int) -> Callable[[], object]:
        tokens = rows * length
        memory = self._memory
        arguments = self._rows(rows, length, 16 * 256) | {
            "x": memory.floats("float32", tokens * 256),
            "time": memory.floats("float32", tokens * 256),
            "rates": memory.floats("float32", 16 * 256),
            "into": memory.floats("float32", tokens * 16),
            "out_of": memory.floats("float32", tokens * 16),
            "out": memory.empty(tokens * 256 * 4),
            "into_stride": 16,
            "out_of_stride": 16,
            "channels": 256,
            "size": 16,
        }
        return partial(self._kernels.scan, number, **arguments)

    def _latent(self, number: int) -> Callable[[], object]:
        memory = self._memory
        arguments = {
            "latents": memory.floats("float32", 256 * 160),
            "places": memory.integers("q", list(range(256)) * 4),
            "lengths": memory.integers("q", [256] * 4),
            "q": memory.floats("float32", 4 * 8 * 160),
            "out": memory.empty(4 * 8 * 128 * 4),
            "stride": 256,
            "rows": 4,
            "heads": 8,
            "size": 160,
            "rank": 128,
            "width": 4,
            "is_bfloat16": False,
            "scale": 0.1,
        }
        return partial(self._kernels.latent, number, **arguments)


def _is_wide(dtype: str) -> bool:
    return SIZES[dtype] == 4


def load(library: str) -> Any:
    """The module of a library of kernels."""
    loader = ExtensionFileLoader("_kernels", library)
    spec = spec_from_loader("_kernels", loader)
    assert spec is not None
    kernels = module_from_spec(spec)
    loader.exec_module(kernels)
    return kernels


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library")
    parser.add_argument("--only", default="")
    parser.add_argument("--collector")
    args = parser.parse_args()
    counter = CallgrindCounter(args.collector) if args.collector else PerfCounter()
    kernels = load(args.library)
    kernels.set_threads(1)
    counts = {}
    for name, case in Cases(kernels):
        if any(word in name for word in args.only.split(",")):
            # A first call has what later ones find: names that were compared, memory of the thread.
            case()
            counts[name] = counter.count(case)
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
