"""CrossStep: a step of cross attention, where only some of the encoders' keys are written, and rows
may share an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from toolkit_lm.attention import (
    Attention,
    AttentionBackend,
    AttentionCall,
    AttentionSpec,
    AttentionType,
    BatchLimits,
    BatchView,
    Binding,
    ForwardContext,
    GroupSetup,
    forward_context,
)
from toolkit_lm.config import VllmConfig
from toolkit_lm_devkit.eager import eager_attention
from toolkit_lm_devkit.naive import naive_attention
from torch import Tensor

LAYER = "model.decoder.layers.0.encoder_attn.attn"


@dataclass
class CrossStep:
    """Rows of (queries, encoder). All values are random. What is in a cache slot that no query sees
    is NaN."""

    backend: type[AttentionBackend]
    encoders: Sequence[int]
    """Their lengths."""
    rows: Sequence[tuple[int, int]]
    written: Sequence[int]
    """The encoders whose keys and values this step brings, in this order. Those of the others were
    written before."""
    heads: tuple[int, int] = (4, 2)
    head_size: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    soft_cap: float | None = None
    sinks: bool = False
    device: str = "cpu"
    padding: int = 0
    """Rows of padding after the others: a query each, which is NaN, and no keys."""
    seed: int = 0
    layer: Attention = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        (num_heads, kv_heads) = self.heads
        size = self.head_size
        self.q = [
            torch.randn(queries, num_heads, size, generator=generator).to(self.dtype)
            for queries, _ in self.rows
        ]
        self.k, self.v = (
            [
                torch.randn(length, kv_heads, size, generator=generator).to(self.dtype)
                for length in self.encoders
            ]
            for _ in range(2)
        )
        self.sink_logits = torch.randn(num_heads, generator=generator) if self.sinks else None
        self.layer = Attention(
            num_heads,
            size,
            vllm_config=VllmConfig.default(
                block_size=self.block_size, dtype=str(self.dtype).removeprefix("torch.")
            ),
            prefix=LAYER,
            num_kv_heads=kv_heads,
            type=AttentionType.CROSS,
            soft_cap=self.soft_cap,
            sinks=None if self.sink_logits is None else self.sink_logits.to(self.device),
        )
        counts = [-(-length // self.block_size) for length in self.encoders]
        order = torch.randperm(sum(counts) + 3, generator=generator).int()
        # Entries past an encoder's blocks are a block of garbage.
        self.table = order[-1].repeat(len(counts), max(counts) + 1)
        for encoder, count in enumerate(counts):
            self.table[encoder, :count] = order[sum(counts[:encoder]) :][:count]

    def spec(self) -> AttentionSpec:
        return self.layer.attention_spec(torch.device(self.device), cached=True)

    def naive(self) -> np.ndarray:
        """[T, heads, size] by the formula in float64."""
        sinks = None if self.sink_logits is None else self.sink_logits.numpy()
        arguments = {
            "kind": "cross",
            "scale": self.layer.params.scale,
            "soft_cap": self.soft_cap,
            "sinks": sinks,
        }
        return np.concatenate(
            [
                naive_attention(*(x.float().numpy() for x in row), **arguments)
                for row in self._rows()
            ]
        )

    def eager(self) -> Tensor:
        """[T, heads, size] in the step's dtype, as transformers' eager attention rounds."""
        arguments = {
            "kind": "cross",
            "scale": self.layer.params.scale,
            "window": None,
            "soft_cap": self.soft_cap,
        }
        return torch.cat(
            [
                eager_attention(*row, **arguments, sinks=self.sink_logits, bias=None)
                for row in self._rows()
            ]
        )

    def run(self) -> Tensor:
        """[T, heads, size] by the backend, through the Attention layer, padding left out."""
        spec = self.spec()
        params = self.layer.params
        limits = BatchLimits(
            len(self.rows) + self.padding,
            sum(queries for queries, _ in self.rows) + self.padding,
            max(self.encoders),
        )
        backend = self.backend(
            GroupSetup(
                layers=[spec],
                kv_cache=spec.kv_cache,
                limits=limits,
                device=torch.device(self.device),
            )
        )
        kv_cache = tuple(
            torch.full(
                (self.table.numel() + 3, *one.shape),
                torch.nan,
                dtype=getattr(torch, one.dtype),
                device=self.device,
            )
            for one in backend.page_layout(spec.kv_cache)
        )
        if earlier := [
            encoder for encoder in range(len(self.encoders)) if encoder not in self.written
        ]:
            meta = backend.build(self._batch([(1, encoder) for encoder in earlier], earlier))
            k = self._brought(self.k, earlier)
            v = self._brought(self.v, earlier)
            no_queries = self.q[0][:0]
            backend.write_kv(AttentionCall(params, no_queries, k, v, kv_cache, meta, no_queries))
        q = torch.cat(
            [*self.q, torch.full((self.padding, *self.q[0].shape[1:]), torch.nan, dtype=self.dtype)]
        )
        brought = [
            self._brought(x, self.written).flatten(1) if self.written else None
            for x in (self.k, self.v)
        ]
        meta = backend.build(self._batch(self.rows, self.written, self.padding))
        with forward_context(
            ForwardContext({LAYER: Binding(backend, params, kv_cache, 0)}, [meta])
        ):
            out: Tensor = self.layer(self._to(q.flatten(1)), *brought)
        return out.view(-1, *self.q[0].shape[1:])[: len(q) - self.padding].cpu()

    def _rows(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [
            (q, self.k[encoder], self.v[encoder])
            for q, (_, encoder) in zip(self.q, self.rows, strict=True)
        ]

    def _brought(self, x: Sequence[Tensor], encoders: Sequence[int]) -> Tensor:
        return self._to(torch.cat([x[encoder] for encoder in encoders]))

    def _batch(
        self, rows: Sequence[tuple[int, int]], written: Sequence[int], padding: int = 0
    ) -> BatchView:
        query_start = np.cumsum(
            [0, *(queries for queries, _ in rows), *[1] * padding], dtype=np.int32
        )
        lengths = np.array(
            [*(self.encoders[encoder] for _, encoder in rows), *[0] * padding], np.int32
        )
        table = torch.cat(
            [self.table[[encoder for _, encoder in rows]], self.table[:1].repeat(padding, 1)]
        )
        return BatchView(
            query_start=query_start,
            seq_lens=lengths,
            starts=np.zeros(len(lengths), np.int64),
            query_start_device=self._to(torch.from_numpy(query_start)),
            seq_lens_device=self._to(torch.from_numpy(lengths)),
            block_table=self._to(table),
            slot_mapping=self._to(
                torch.cat([torch.empty(0, dtype=torch.int64), *map(self._slots, written)])
            ),
            max_query_len=int(np.diff(query_start).max()),
            max_seq_len=int(lengths.max()),
            has_padding=padding > 0,
        )

    def _slots(self, encoder: int) -> Tensor:
        positions = torch.arange(self.encoders[encoder])
        return (
            self.table[encoder, positions // self.block_size].long() * self.block_size
            + positions % self.block_size
        )

    def _to(self, tensor: Tensor) -> Any:
        return tensor.to(self.device)
