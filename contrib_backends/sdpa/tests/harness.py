"""Runs one step of an Attention layer on the backend, out of a cache whose unused slots and blocks are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from llm_toolkit.attention import Attention, AttentionType, BatchView, Binding, GroupMetadata, forward_context
from llm_toolkit.config import VllmConfig
from llm_toolkit_sdpa.backend import SdpaBackend
from torch import Tensor

from .naive import naive_attention


def alibi(heads: int):
    """ALiBi as the layer takes it, and as the naive formula does."""
    slopes = torch.tensor([2.0 ** -(h + 1) for h in range(heads)])
    return (
        lambda q, k: -slopes[:, None, None] * (q[:, None] - k[None]).abs(),
        lambda head, i, j: -(2.0 ** -(head + 1)) * abs(i - j),
    )


def relative_table(heads: int):
    """A learned table over clipped distances, as in T5; the layer's comes out with the heads last in memory."""
    table = torch.randn(17, heads, generator=torch.Generator().manual_seed(7))
    return (
        lambda q, k: table[(k[None] - q[:, None]).clamp(-8, 8) + 8].permute(2, 0, 1),
        lambda head, i, j: float(table[max(-8, min(8, j - i)) + 8, head]),
    )


BIASES = {"alibi": alibi, "table": relative_table}


@dataclass
class Step:
    """One step: rows of (queries, keys), where a decoder's queries are the last of its keys."""

    rows: Sequence[tuple[int, int]]
    type: AttentionType = AttentionType.DECODER
    cached: bool = True
    heads: tuple[int, int] = (4, 2)
    head_size: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    bias: str | None = None
    spans: Sequence[Sequence[tuple[int, int]]] | None = None
    device: str = "cpu"
    seed: int = 0
    layer: Attention = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        (num_heads, kv_heads), size = self.heads, self.head_size
        self.q = [random(queries, num_heads, size) for queries, _ in self.rows]
        self.k = [random(keys, kv_heads, size) for _, keys in self.rows]
        self.v = [random(keys, kv_heads, size) for _, keys in self.rows]
        self.sink_logits = torch.randn(num_heads, generator=generator) if self.sinks else None
        self.table_order = torch.Generator().manual_seed(self.seed + 1)
        layer_bias, self.naive_bias = BIASES[self.bias](num_heads) if self.bias else (None, None)
        self.layer = Attention(
            num_heads,
            size,
            vllm_config=VllmConfig.default(block_size=self.block_size, dtype=str(self.dtype).removeprefix("torch.")),
            prefix="layer",
            num_kv_heads=kv_heads,
            type=self.type,
            window=self.window,
            soft_cap=self.soft_cap,
            bias=layer_bias,
            sinks=self.sink_logits,
            spans=self.spans is not None,
        )

    def new(self, row: int) -> int:
        """First key of a row that this step brings."""
        queries, keys = self.rows[row]
        return keys - queries if self.type is AttentionType.DECODER else 0

    def visible(self, row: int) -> int:
        """First key of a row that any query of this step sees."""
        if self.window is None or self.type is not AttentionType.DECODER:
            return 0
        first = max(0, self.new(row) - self.window + 1)
        return min([first, *(start for start, end in (self.spans[row] if self.spans else ()) if end > self.new(row))])

    def naive(self) -> np.ndarray:
        """[T, heads, size] in float64."""
        rows = range(len(self.rows))
        return np.concatenate(
            [
                naive_attention(
                    *(x[row].float().numpy() for x in (self.q, self.k, self.v)),
                    kind=str(self.type),
                    scale=self.layer.scale,
                    window=self.window,
                    soft_cap=self.soft_cap,
                    sinks=None if self.sink_logits is None else self.sink_logits.numpy(),
                    bias=self.naive_bias,
                    spans=self.spans[row] if self.spans else (),
                )
                for row in rows
            ]
        )

    def run(self) -> Tensor:
        """[T, heads, size] by the backend, through the Attention layer."""
        backend = SdpaBackend(torch.device(self.device))
        kv_cache, table = self._cache(backend) if self.cached else (None, None)
        slots = None if table is None else torch.cat([self._slots(table, row, self.new(row)) for row in range(len(self.rows))])
        query_start = np.cumsum([0, *(queries for queries, _ in self.rows)], dtype=np.int32)
        lengths = np.array([keys for _, keys in self.rows], dtype=np.int32)
        batch = BatchView(
            query_start=query_start,
            seq_lens=lengths,
            query_start_device=self._to(torch.from_numpy(query_start)),
            seq_lens_device=self._to(torch.from_numpy(lengths)),
            block_table=self._to(table),
            slot_mapping=self._to(slots),
            max_query_len=max(queries for queries, _ in self.rows),
            max_seq_len=int(lengths.max()),
            spans=self.spans,
        )
        k, v = (torch.cat([x[row][self.new(row) :] for row in range(len(self.rows))]) for x in (self.k, self.v))
        arguments = [self._to(x.flatten(1)) for x in (torch.cat(self.q), k, v)]
        binding = {"layer": Binding(backend, self._to(kv_cache), 0)}
        with forward_context(binding, [GroupMetadata(backend.build(batch), batch.slot_mapping)]):
            out = self.layer.to(self.device)(*arguments)
        return out.view(-1, self.heads[0], self.head_size).cpu()

    def _cache(self, backend: SdpaBackend) -> tuple[Tensor, Tensor]:
        """The cache before the step, in scattered blocks, and the block table, padded with a block of garbage."""
        counts = [-(-keys // self.block_size) for _, keys in self.rows]
        num_blocks = sum(counts) + 3
        spec = self.layer.kv_cache_spec()
        assert spec is not None
        kv_cache = torch.full(backend.kv_cache_shape(spec, num_blocks), torch.nan, dtype=self.dtype)
        order = torch.randperm(num_blocks, generator=self.table_order).tolist()
        garbage = order.pop()
        table = torch.full((len(self.rows), max(counts) + 2), garbage, dtype=torch.int32)
        for row, count in enumerate(counts):
            kept = range(self.visible(row) // self.block_size, count)
            table[row, kept.start : kept.stop] = torch.tensor([order.pop() for _ in kept], dtype=torch.int32)
            past = slice(self.visible(row), self.new(row))
            slots = self._slots(table, row, past.start)[: max(0, past.stop - past.start)]
            for half, source in enumerate((self.k[row], self.v[row])):
                kv_cache[half].view(-1, *kv_cache.shape[3:])[slots] = source[past]
        return kv_cache, table

    def _slots(self, table: Tensor, row: int, first: int) -> Tensor:
        """Slots of a row's keys from `first` on."""
        positions = torch.arange(first, self.rows[row][1])
        return table[row, positions // self.block_size].long() * self.block_size + positions % self.block_size

    def _to(self, tensor: Any) -> Any:
        return None if tensor is None else tensor.to(self.device)


def all_pairs(factors: dict[str, Sequence[Any]], allowed, seed: int = 0) -> list[dict[str, Any]]:
    """Cases that cover, between them, each allowed pair of values of any two factors (a greedy selection)."""
    rng = np.random.default_rng(seed)
    names = list(factors)

    def pairs(case: dict[str, Any]) -> set:
        return {(a, repr(case[a]), b, repr(case[b])) for n, a in enumerate(names) for b in names[n + 1 :]}

    pool = [{name: values[rng.integers(len(values))] for name, values in factors.items()} for _ in range(4000)]
    pool = [case for case in pool if allowed(case)]
    missing = set().union(*(pairs(case) for case in pool))
    chosen = []
    while missing:
        best = max(pool, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen
