"""Attention of one layer, by each backend in turn: microseconds per step, KV write included, and
the ratio to the first backend.

usage: python benchmarks/attention.py [--rounds 15] [--dtype bfloat16 float32] [--caches]

--caches: the kernels `cpu` alone, with keys and values in the model's dtype, in int8 and in fp8.

The steps go over the caches of twelve layers, so that keys come from memory, not from a core's
cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace
from toolkit_lm.attention import (
    Attention,
    AttentionBackend,
    AttentionCall,
    BatchLimits,
    BatchView,
    GroupSetup,
)
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import FullSpec
from toolkit_lm_cpu.backend import CpuBackend
from toolkit_lm_sdpa.backend import SdpaBackend

LAYERS = 12
BLOCK_SIZE = 16
Rows = Sequence[tuple[int, int]]
"""Queries and keys of each row."""
STEPS: list[tuple[str, Rows, tuple[int, int, int]]] = [
    ("decode, 1 row of 160 keys", [(1, 160)], (12, 12, 64)),
    ("decode, 32 rows of 160 keys", [(1, 160)] * 32, (12, 12, 64)),
    ("decode, 32 rows of 160 keys, GQA", [(1, 160)] * 32, (16, 8, 128)),
    ("decode, 4 rows of 6,000 keys, GQA", [(1, 6000)] * 4, (16, 8, 128)),
    ("prefill, 2 x 1,024", [(1024, 1024)] * 2, (12, 12, 64)),
    ("prefill, 2 x 1,024, GQA", [(1024, 1024)] * 2, (16, 8, 128)),
    ("the last 512 of 4,096, GQA", [(512, 4096)], (16, 8, 128)),
]
"""Name, rows, and (query heads, KV heads, head size)."""


QUANTIZED_STEPS: list[tuple[str, Rows, tuple[int, int, int]]] = [
    *(
        (f"decode, {rows} row{'s' * (rows > 1)} of {keys:,} keys", [(1, keys)] * rows, (16, 8, 128))
        for rows in (1, 8)
        for keys in (160, 512, 2048, 8192)
    ),
    ("decode, 32 rows of 160 keys", [(1, 160)] * 32, (16, 8, 128)),
    ("the last 512 of 2,048", [(512, 2048)], (16, 8, 128)),
]
CACHES = ("model", "int8", "fp8")
CODES = {"int8": "int8", "fp8": "float8_e4m3fn"}


class Case:
    """One step on one backend, ready to run."""

    def __init__(
        self,
        backend: type[AttentionBackend],
        rows: Rows,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        cache: str = "model",
    ) -> None:
        heads, kv_heads, size = shape
        config = VllmConfig.default(dtype=str(dtype).removeprefix("torch."), block_size=BLOCK_SIZE)
        layer = Attention(
            heads,
            size,
            num_kv_heads=kv_heads,
            vllm_config=config,
            prefix="model.layers.0.self_attn.attn",
        )
        kept = layer.kv_cache_spec()
        if cache != "model":
            assert isinstance(kept, FullSpec)
            layer.keep(replace(kept, dtype=CODES[cache], scales="token"))
        spec = layer.attention_spec(torch.device("cpu"), cached=True)
        device = torch.device("cpu")
        assert spec.kv_cache is not None
        if (refusal := backend.refuses(spec)) is not None:
            raise SystemExit(f"{backend.__name__} refuses: {refusal}")
        self.params = layer.params
        self.batch = _batch(rows)
        num_blocks = sum(-(-keys // BLOCK_SIZE) for _, keys in rows)
        limits = BatchLimits(len(rows), self.batch.num_tokens, self.batch.max_seq_len)
        self.backend = backend(
            GroupSetup(layers=[spec], kv_cache=spec.kv_cache, limits=limits, device=device)
        )
        layout = backend.page_layout(spec.kv_cache)
        self.caches = [
            tuple(_random(num_blocks, one.shape, getattr(torch, one.dtype)) for one in layout)
            for _ in range(LAYERS)
        ]
        packed = torch.randn(self.batch.num_tokens, heads + 2 * kv_heads, size).to(dtype)
        self.q, self.k, self.v = torch.split(packed, [heads, kv_heads, kv_heads], dim=1)
        self.out = torch.empty(self.q.shape, dtype=dtype)

    def seconds(self) -> float:
        """Seconds of a layer."""
        start = time.perf_counter()
        meta = self.backend.build(self.batch)
        for cache in self.caches:
            call = AttentionCall(self.params, self.q, self.k, self.v, cache, meta, self.out)
            self.backend.write_kv(call)
            self.backend.forward(call)
        return (time.perf_counter() - start) / LAYERS


def _random(num_blocks: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Elements, codes or scales of pages."""
    if dtype is torch.uint8 or dtype is torch.int8:
        return torch.randint(0, 100, (num_blocks, *shape), dtype=dtype)
    return torch.randn(num_blocks, *shape).to(dtype)


def _batch(rows: Rows) -> BatchView:
    query_start = np.cumsum([0, *(queries for queries, _ in rows)], dtype=np.int32)
    seq_lens = np.array([keys for _, keys in rows], np.int32)
    counts = -(-seq_lens // BLOCK_SIZE)
    blocks = torch.split(torch.randperm(int(counts.sum()), dtype=torch.int32), counts.tolist())
    table = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
    positions = [torch.arange(keys - queries, keys) for queries, keys in rows]
    slots = [
        table[row, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
        for row, at in enumerate(positions)
    ]
    return BatchView(
        query_start=query_start,
        seq_lens=seq_lens,
        starts=(seq_lens - np.diff(query_start)).astype(np.int64),
        query_start_device=torch.from_numpy(query_start),
        seq_lens_device=torch.from_numpy(seq_lens),
        block_table=table,
        slot_mapping=torch.cat(slots),
        max_query_len=int(np.diff(query_start).max()),
        max_seq_len=int(seq_lens.max()),
    )


def compare_caches(rounds: int, dtypes: Sequence[str]) -> None:
    """Prints the times of quantized caches beside those of the model's dtype."""
    print(f"| step | dtype | {', us | '.join(CACHES)}, us | ratios |\n| --- | --- {'| --- ' * 4}|")
    for dtype in dtypes:
        for name, rows, shape in QUANTIZED_STEPS:
            cases = [Case(CpuBackend, rows, shape, getattr(torch, dtype), it) for it in CACHES]
            times = [[case.seconds() for case in cases] for _ in range(rounds + 2)][2:]
            plain, *others = (
                1e6 * statistics.median(column) for column in zip(*times, strict=True)
            )
            columns = " | ".join(f"{time:.0f}" for time in (plain, *others))
            ratios = ", ".join(f"{plain / other:.2f}x" for other in others)
            print(f"| {name} | {dtype} | {columns} | {ratios} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--caches", action="store_true")
    args = parser.parse_args()
    if args.caches:
        compare_caches(args.rounds, args.dtype)
        return
    print("| step | dtype | sdpa, us | cpu, us | ratio |\n| --- | --- | --- | --- | --- |")
    for dtype in args.dtype:
        for name, rows, shape in STEPS:
            cases = [
                Case(backend, rows, shape, getattr(torch, dtype))
                for backend in (SdpaBackend, CpuBackend)
            ]
            times = [[case.seconds() for case in cases] for _ in range(args.rounds + 2)][2:]
            sdpa, cpu = (1e6 * statistics.median(column) for column in zip(*times, strict=True))
            print(f"| {name} | {dtype} | {sdpa:.0f} | {cpu:.0f} | {sdpa / cpu:.1f}x |", flush=True)


if __name__ == "__main__":
    main()
