"""AttentionStep: one step of an Attention layer on a backend, out of a cache whose unused slots and
blocks are NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from toolkit_lm.attention import (
    Attention,
    AttentionBackend,
    AttentionBias,
    AttentionCall,
    AttentionType,
    BatchLimits,
    BatchView,
    Binding,
    ForwardContext,
    GroupSetup,
    forward_context,
)
from toolkit_lm.config import VllmConfig
from torch import Tensor

from toolkit_lm_devkit.eager import eager_attention
from toolkit_lm_devkit.naive import naive_attention

LAYER = "model.layers.0.self_attn.attn"


class Bias(NamedTuple):
    """One additive bias, as the layer takes it and as the naive formula does."""

    layer: AttentionBias
    naive: Callable[[int, int, int], float]
    """(head, query position, key position) -> bias."""


def alibi(heads: int) -> Bias:
    """ALiBi (Press et al. 2022)."""
    slopes = torch.tensor([2.0 ** -(h + 1) for h in range(heads)])
    return Bias(
        lambda q, k: -slopes.to(q.device)[:, None, None] * (q[:, None] - k[None]).abs(),
        lambda head, i, j: -(2.0 ** -(head + 1)) * abs(i - j),
    )


def relative_table(heads: int) -> Bias:
    """A learned table over clipped distances, as in T5; the layer's comes out with the heads last
    in memory."""
    table = torch.randn(17, heads, generator=torch.Generator().manual_seed(7))
    return Bias(
        lambda q, k: table.to(q.device)[(k[None] - q[:, None]).clamp(-8, 8) + 8].permute(2, 0, 1),
        lambda head, i, j: float(table[max(-8, min(8, j - i)) + 8, head]),
    )


class OffsetTable:
    """The same table, which says that it depends on offsets alone."""

    def __init__(self, heads: int) -> None:
        self.table = torch.randn(heads, 17, generator=torch.Generator().manual_seed(8))

    def __call__(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        return self.table.to(q_positions.device)[
            :, (k_positions[None] - q_positions[:, None]).clamp(-8, 8) + 8
        ]

    def by_offset(self, most: int) -> Tensor:
        return self.table[:, torch.arange(-most, most + 1).clamp(-8, 8) + 8]


def by_offset(heads: int) -> Bias:
    """An OffsetBias."""
    bias = OffsetTable(heads)
    return Bias(bias, lambda head, i, j: float(bias.table[head, max(-8, min(8, j - i)) + 8]))


BIASES = {"alibi": alibi, "table": relative_table, "offsets": by_offset}


CACHES = {
    "int8": {"dtype": "int8", "scales": "token"},
    "fp8": {"dtype": "float8_e4m3fn", "scales": "token"},
    "fp8 of the layer": {"dtype": "float8_e4m3fn", "scales": "layer"},
}
"""Quantized caches: fields of their specs."""
LAYER_SCALES = 0.03, 0.02
"""Scales of keys and values, where they are the layer's."""


def round_trip(x: Tensor, cache: str, scale: float) -> Tensor:
    """Keys or values [T, heads, head_size] as a quantized cache gives them back, in float32.
    `scale`: the layer's."""
    fields = CACHES[cache]
    dtype = getattr(torch, fields["dtype"])
    greatest = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    x = x.float()
    scales = torch.full((*x.shape[:-1], 1), scale)
    if fields["scales"] == "token":
        largest = x.abs().amax(-1, keepdim=True)
        scales = torch.where(largest == 0, 1.0, largest / greatest)
    codes = (x / scales).clamp(-greatest, greatest)
    return (codes.round() if dtype is torch.int8 else codes.to(dtype).float()) * scales


@dataclass
class AttentionStep:
    """One step: rows of (queries, keys), where a decoder's queries are the last of its keys. All
    values are random.

    An encoder may have fewer keys than queries: the first of its tokens are seen, and the others'
    keys and values are NaN.
    """

    backend: type[AttentionBackend]
    rows: Sequence[tuple[int, int]]
    type: AttentionType = AttentionType.DECODER
    cached: bool = True
    heads: tuple[int, int] = (4, 2)
    """Query heads, KV heads."""
    head_size: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    """Factor that scores are multiplied by. None: head_size ** -0.5."""
    sinks: bool = False
    bias: str | None = None
    """A key of BIASES."""
    spans: bool = False
    """Tokens are in spans, of random lengths, some of which begin before the step."""
    cache: str | None = None
    """A key of CACHES: the cache is quantized."""
    device: str = "cpu"
    padding: int = 0
    """Rows of padding after the others: a query each, whose key and value are NaN."""
    seed: int = 0
    layer: Attention = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        (num_heads, kv_heads) = self.heads
        size = self.head_size
        self.q = [random(queries, num_heads, size) for queries, _ in self.rows]
        self.k = [random(keys, kv_heads, size) for _, keys in self.rows]
        self.v = [random(keys, kv_heads, size) for _, keys in self.rows]
        self.sink_logits = torch.randn(num_heads, generator=generator) if self.sinks else None
        self.table_order = torch.Generator().manual_seed(self.seed + 1)
        self.biases = BIASES[self.bias](num_heads) if self.bias else None
        self.layer = Attention(
            num_heads,
            size,
            vllm_config=VllmConfig.default(
                block_size=self.block_size, dtype=str(self.dtype).removeprefix("torch.")
            ),
            prefix=LAYER,
            num_kv_heads=kv_heads,
            type=self.type,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            bias=self.biases.layer if self.biases else None,
            sinks=None if self.sink_logits is None else self.sink_logits.to(self.device),
            spans=self.spans,
        )
        self.seen_k = self.k
        self.seen_v = self.v
        if self.cache is not None:
            spec = self.layer.kv_cache_spec()
            assert spec is not None
            # A loader makes a layer on its device, too.
            with torch.device(self.device):
                self.layer.keep(msgspec.structs.replace(spec, **CACHES[self.cache]))
            k_scale, v_scale = LAYER_SCALES
            for scale, value in zip(
                (self.layer.params.k_scale, self.layer.params.v_scale), LAYER_SCALES, strict=True
            ):
                if scale is not None:
                    scale.data.fill_(value)
            self.seen_k = [round_trip(k, self.cache, k_scale) for k in self.k]
            self.seen_v = [round_trip(v, self.cache, v_scale) for v in self.v]
        random_lengths = np.random.default_rng(self.seed)
        self.row_spans = [_random_spans(random_lengths, keys) for _, keys in self.rows]

    def naive(self) -> np.ndarray:
        """[T, heads, size] by the formula in float64."""
        sinks = None if self.sink_logits is None else self.sink_logits.numpy()
        bias = self.biases.naive if self.biases else None
        return np.concatenate(
            [
                naive_attention(
                    *(x[row].float().numpy() for x in (self.q, self.seen_k, self.seen_v)),
                    **self._asked(row),
                    sinks=sinks,
                    bias=bias,
                )
                for row in range(len(self.rows))
            ]
        )

    def eager(self) -> Tensor:
        """[T, heads, size] in the step's dtype, as transformers' eager attention rounds."""
        bias = self.biases.layer if self.biases else None
        return torch.cat(
            [
                eager_attention(
                    self.q[row],
                    self.seen_k[row].to(self.dtype),
                    self.seen_v[row].to(self.dtype),
                    **self._asked(row),
                    sinks=self.sink_logits,
                    bias=bias,
                )
                for row in range(len(self.rows))
            ]
        )

    def run(self) -> Tensor:
        """[T, heads, size] by the backend, through the Attention layer, padding left out."""
        return self.run_and_keep()[0]

    def run_and_keep(self) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Runs the step like `run`. Also returns the cache's content afterwards."""
        spec = self.layer.attention_spec(torch.device(self.device), cached=self.cached)
        num_tokens = sum(queries for queries, _ in self.rows)
        longest = max(max(row) for row in self.rows)
        limits = BatchLimits(len(self.rows) + self.padding, num_tokens + self.padding, longest)
        backend = self.backend(
            GroupSetup(
                layers=[spec],
                kv_cache=spec.kv_cache,
                limits=limits,
                device=torch.device(self.device),
            )
        )
        kv_cache, table = self._cache(backend) if self.cached else (None, None)
        slots = (
            None
            if table is None
            else torch.cat(
                [self._slots(table, row, self._new(row)) for row in range(len(self.rows))]
            )
        )
        if slots is not None and table is not None:
            slots = torch.cat([slots, torch.full((self.padding,), -1)])
            table = torch.cat([table, torch.zeros(self.padding, table.shape[1], dtype=torch.int32)])
        none = [0] * self.padding
        batch = self._batch(
            [*(queries for queries, _ in self.rows), *[1] * self.padding],
            [*(keys for _, keys in self.rows), *none],
            [*(self._new(row) for row in range(len(self.rows))), *none],
            table,
            slots,
            self._step_spans(),
        )
        brought = [
            torch.cat([self._brought(x[row], row) for row in range(len(self.rows))])
            for x in (self.k, self.v)
        ]
        padded = [
            torch.cat([x, torch.full((self.padding, *x.shape[1:]), torch.nan)])
            for x in (torch.cat(self.q), *brought)
        ]
        arguments = [self._to(x.to(self.dtype).flatten(1)) for x in padded]
        bindings = {LAYER: Binding(backend, self.layer.params, kv_cache, 0)}
        with forward_context(ForwardContext(bindings, [backend.build(batch)])):
            out: Tensor = self.layer(*arguments)
        return out.view(-1, self.heads[0], self.head_size)[:num_tokens].cpu(), kv_cache

    def _brought(self, x: Tensor, row: int) -> Tensor:
        """A row's keys or values that this step brings."""
        unseen = max(self.rows[row][0] - len(x), 0) if self.type is AttentionType.ENCODER else 0
        return torch.cat(
            [x[self._new(row) :], torch.full((unseen, *x.shape[1:]), float("nan"), dtype=x.dtype)]
        )

    def _asked(self, row: int) -> dict[str, Any]:
        """The arguments that both formulas share."""
        params = self.layer.params
        spans = self.row_spans[row] if self.spans else None
        return {
            "kind": str(self.type),
            "scale": params.scale,
            "window": params.window,
            "soft_cap": params.soft_cap,
            "spans": spans,
        }

    def _new(self, row: int) -> int:
        """First key of a row that this step brings."""
        queries, keys = self.rows[row]
        return keys - queries if self.type is AttentionType.DECODER else 0

    def _visible(self, row: int) -> int:
        """First key of a row that any query of this step sees. Blocks before it may be gone."""
        if self.window is None or self.type is not AttentionType.DECODER:
            return 0
        return max(0, self._new(row) - self.window + 1)

    def _cache(self, backend: AttentionBackend) -> tuple[tuple[Tensor, ...], Tensor]:
        """The cache before the step, in scattered blocks, and the block table, padded with a block
        of garbage."""
        counts = [-(-keys // self.block_size) for _, keys in self.rows]
        num_blocks = sum(counts) + 3
        spec = self.layer.keeps
        assert spec is not None
        kv_cache = tuple(
            torch.full(
                (num_blocks, *tensor.shape),
                127 if tensor.dtype == "int8" else torch.nan,
                dtype=getattr(torch, tensor.dtype),
                device=self.device,
            )
            for tensor in backend.page_layout(spec)
        )
        order = torch.randperm(num_blocks, generator=self.table_order).tolist()
        garbage = order.pop()
        table = torch.full((len(self.rows), max(counts) + 2), garbage, dtype=torch.int32)
        for row, count in enumerate(counts):
            kept = range(self._visible(row) // self.block_size, count)
            table[row, kept.start : kept.stop] = torch.tensor(
                [order.pop() for _ in kept], dtype=torch.int32
            )
            past = slice(self._visible(row), self._new(row))
            if past.start < past.stop:
                slots = self._slots(table, row, past.start)[: past.stop - past.start]
                meta = backend.build(
                    self._batch(
                        [len(slots)], [past.stop], [past.start], table[row : row + 1], slots
                    )
                )
                k = self._to(self.k[row][past])
                v = self._to(self.v[row][past])
                no_queries = self._to(self.q[row][:0])
                backend.write_kv(
                    AttentionCall(self.layer.params, no_queries, k, v, kv_cache, meta, no_queries)
                )
        return kv_cache, table

    def _step_spans(self) -> np.ndarray | None:
        """Spans of all tokens of the step."""
        if not self.spans:
            return None
        padding = np.tile(np.array([[0, 1]], np.int32), (self.padding, 1))
        return np.concatenate(
            [*(spans[self._new(row) :] for row, spans in enumerate(self.row_spans)), padding]
        )

    def _batch(
        self,
        queries: Sequence[int],
        lengths: Sequence[int],
        starts: Sequence[int],
        table: Tensor | None,
        slots: Tensor | None,
        spans: np.ndarray | None = None,
    ) -> BatchView:
        query_start = np.cumsum([0, *queries], dtype=np.int32)
        seq_lens = np.array(lengths, np.int32)
        return BatchView(
            query_start=query_start,
            seq_lens=seq_lens,
            starts=np.array(starts),
            query_start_device=self._to(torch.from_numpy(query_start)),
            seq_lens_device=self._to(torch.from_numpy(seq_lens)),
            block_table=self._to(table),
            slot_mapping=self._to(slots),
            max_query_len=max(queries),
            max_seq_len=max(lengths),
            has_padding=bool((seq_lens == 0).any()),
            spans=spans,
        )

    def _slots(self, table: Tensor, row: int, first: int) -> Tensor:
        """Slots of a row's keys from `first` on."""
        positions = torch.arange(first, self.rows[row][1])
        return (
            table[row, positions // self.block_size].long() * self.block_size
            + positions % self.block_size
        )

    def _to(self, tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.to(self.device)


def _random_spans(random: np.random.Generator, length: int) -> np.ndarray:
    """[length, 2] int32: [start, end) of the span of each position, between tokens that are in
    none."""
    spans = np.stack([np.arange(length), np.arange(length) + 1], axis=1).astype(np.int32)
    start = int(random.integers(0, 5))
    while start < length:
        end = min(length, start + int(random.integers(2, 25)))
        spans[start:end] = start, end
        start = end + int(random.integers(0, 8))
    return spans
