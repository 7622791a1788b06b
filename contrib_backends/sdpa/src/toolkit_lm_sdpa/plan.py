"""Plan of one step for a layer: rows that are computed together, the indices of their keys, and
masks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from toolkit_lm.attention import AttentionType, BatchView, LayerParams
from torch import Tensor

_SHORT = 64
"""Decode rows of up to so many keys share a bucket, however much of it is padding."""
_STEP = 64
"""Multiple to which a masked row's keys are padded. torch builds a kernel for each number of keys
and never frees it."""
_BUCKET_KEYS = 32768
"""Most keys in a bucket, over all its rows: bounds the memory of the gathered keys."""


class LayerKey(NamedTuple):
    """The properties of a layer, and of its cache, that a plan depends on."""

    type: AttentionType | str
    window: int | None
    bias: bool
    shaped: bool
    """Whether scores are capped or joined by sinks, which torch's kernels cannot compute."""
    num_kv_heads: int
    block_size: int | None
    spans: bool

    @classmethod
    def of(cls, layer: LayerParams, kv_cache: tuple[Tensor, ...] | None) -> LayerKey:
        shaped = layer.soft_cap is not None or layer.sinks is not None
        block_size = None if kv_cache is None else kv_cache[0].shape[2]
        return cls(
            layer.attention_type,
            layer.window,
            layer.bias is not None,
            shaped,
            layer.num_kv_heads,
            block_size,
            layer.spans,
        )

    @property
    def explicit(self) -> bool:
        """Whether scores are computed by the explicit formula, which needs each mask in full."""
        return self.shaped or self.bias


@dataclass(frozen=True, slots=True)
class Bucket:
    """N decode rows (one query each) of similar length, padded to L keys. Padding repeats a key of
    the same row."""

    tokens: Tensor | None
    """[N] int64: indices of the rows' queries. None: the whole batch, in order."""
    index: Tensor
    """[N * num_kv_heads, L] int64: their keys in the cache, seen as vectors [num_blocks * 2 *
    block_size * num_kv_heads, head_size]."""
    mask: Tensor
    """Mask, [N, 1, 1, L] fp32, 0 or -inf."""
    q_positions: Tensor
    """[N]: positions of the queries."""
    k_positions: Tensor | None
    """[L]: positions of the keys. None unless the layer has a bias, when rows start at different
    positions."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence with Tq queries and Tk keys."""

    tokens: slice
    index: Tensor | None
    """[num_kv_heads, Tk] int64, as a bucket's; None: the keys are the step's own, the first Tk at
    `tokens`."""
    causal: bool
    """Whether queries see themselves and earlier tokens only. Tq = Tk."""
    visible: Tensor | None
    """Mask, [Tq, Tk] bool. None: each query sees all keys, or as `causal` says."""
    q_positions: Tensor
    """[Tq]: positions of the queries."""
    k_positions: Tensor
    """[Tk]: positions of the keys."""


@dataclass(frozen=True, slots=True)
class EqualLengthRows:
    """N sequences of L tokens each, all of which see each other; nothing is cached."""

    tokens: slice | Tensor
    """Slice or indices of the tokens, one sequence after the other. Indices are [N * L] int64,
    where other tokens lie between."""
    positions: Tensor
    """[L]: positions of the tokens of each sequence."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How a layer computes a step."""

    buckets: list[Bucket]
    rows: list[Row]
    equal_length: list[EqualLengthRows]
    keyless: list[slice]
    """Tokens that have no key at all: their output is 0."""


def make_plan(batch: BatchView, key: LayerKey) -> LayerPlan:
    """The plan of a step for such layers."""
    return _Planner(batch, key).plan()


class _Planner:
    def __init__(self, batch: BatchView, key: LayerKey) -> None:
        self.batch = batch
        self.key = key
        self.device = batch.seq_lens_device.device

    def plan(self) -> LayerPlan:
        starts = self.batch.query_start
        lengths = self.batch.seq_lens
        plan = LayerPlan([], [], [], [])
        decode = []
        by_length: dict[int, list[slice]] = {}
        for row in range(self.batch.num_rows):
            tokens = slice(int(starts[row]), int(starts[row + 1]))
            if lengths[row] == 0:
                plan.keyless.append(tokens)
            elif tokens.stop - tokens.start == 1 and self.key.block_size is not None:
                decode.append(row)
            elif lengths[row] == tokens.stop - tokens.start and self._sees_all(
                tokens.stop - tokens.start
            ):
                by_length.setdefault(tokens.stop - tokens.start, []).append(tokens)
            else:
                plan.rows.append(self._row(row, tokens))
        plan.equal_length.extend(
            self._equal_length(length, rows) for length, rows in by_length.items()
        )
        if decode:
            rows = np.array(decode)
            ends = lengths[rows].astype(np.int64)
            begins = np.array([self._first_key(int(end) - 1) for end in ends])
            plan.buckets.extend(
                self._bucket(rows[part], begins[part], ends[part]) for part in split(ends - begins)
            )
        return plan

    def _sees_all(self, length: int) -> bool:
        """Sequences of so many tokens have no cache and no mask, and torch's kernels can compute
        them."""
        key = self.key
        return (
            key.type is AttentionType.ENCODER
            and not key.shaped
            and (key.window is None or key.window >= length)
        )

    def _equal_length(self, length: int, rows: list[slice]) -> EqualLengthRows:
        positions = torch.arange(length, device=self.device)
        first = rows[0].start
        end = rows[-1].stop
        if end - first == length * len(rows):
            return EqualLengthRows(slice(first, end), positions)
        return EqualLengthRows(
            self._device(np.concatenate([np.arange(row.start, row.stop) for row in rows])),
            positions,
        )

    def _bucket(self, rows: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> Bucket:
        # The positions are counted on the device: the host sends three numbers for each row.
        offset = np.full_like(begins, begins.min()) if self.key.bias else begins
        longest = int((ends - offset).max())
        bounds = self._device(np.stack([rows, begins, ends]))
        first = bounds[1][:, None]
        end = bounds[2][:, None]
        positions = (int(offset[0]) if self.key.bias else first) + torch.arange(
            longest, device=self.device
        )[None]
        hidden = (positions < first) | (positions >= end)
        mask = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, float("-inf"))
        whole = len(rows) == self.batch.num_tokens
        return Bucket(
            tokens=None if whole else self._device(self.batch.query_start[rows].astype(np.int64)),
            index=self._cache_index(bounds[0], positions.clamp(first, end - 1)),
            mask=mask[:, None, None],
            q_positions=bounds[2] - 1,
            k_positions=positions[0] if self.key.bias else None,
        )

    def _row(self, row: int, tokens: slice) -> Row:
        num_queries = tokens.stop - tokens.start
        end = int(self.batch.seq_lens[row])
        encoder = self.key.type is AttentionType.ENCODER
        fresh = encoder or (self.key.type is AttentionType.DECODER and num_queries == end)
        assert fresh or self.key.block_size is not None, (
            "a layer without a cache sees keys of earlier steps"
        )
        begin = 0 if fresh else self._first_key(end - num_queries)
        last = end
        if self.key.type is AttentionType.DECODER and not fresh and not self.key.explicit:
            # The keys after the queries are hidden.
            last = begin + math.ceil((end - begin) / _STEP) * _STEP
        k_positions = torch.arange(begin, last, device=self.device)
        first_query = 0 if encoder else end - num_queries
        q_positions = torch.arange(first_query, first_query + num_queries, device=self.device)
        causal, visible = self._visibility(
            row, q_positions, k_positions, self._span_ends(tokens, first_query, end)
        )
        return Row(
            tokens=tokens,
            index=None
            if fresh
            else self._cache_index(slice(row, row + 1), k_positions[None].clamp(max=end - 1)),
            causal=causal,
            visible=visible,
            q_positions=q_positions,
            k_positions=k_positions,
        )

    def _span_ends(self, tokens: slice, first_query: int, end: int) -> Tensor | None:
        """End of the keys that each query sees. None: each query sees up to itself."""
        spans = self.batch.spans if self.key.spans else None
        if (
            spans is None
            or (spans[tokens, 1] == first_query + 1 + np.arange(tokens.stop - tokens.start)).all()
        ):
            return None
        ends = spans[tokens, 1].astype(np.int64)
        assert ends.max() <= end, "a span ends after the step"
        return self._device(ends)

    def _visibility(
        self, row: int, q: Tensor, k: Tensor, ends: Tensor | None
    ) -> tuple[bool, Tensor | None]:
        """`causal` and `visible` of a Row with queries and keys at these positions."""
        causal = self.key.type is AttentionType.DECODER
        length = max(int(self.batch.seq_lens[row]), len(q))
        window = length if self.key.window is None else min(self.key.window, length)
        if self.key.type is AttentionType.CROSS or (not causal and window == length):
            return False, None
        if (
            causal
            and window == length
            and not self.key.explicit
            and len(q) == len(k)
            and ends is None
        ):
            return True, None
        hidden = ends if ends is not None else q + (1 if causal else window)
        return False, (k[None] > q[:, None] - window) & (k[None] < hidden[:, None])

    def _first_key(self, query: int) -> int:
        """The first position that the query at position `query` can see, and those after it."""
        if self.key.window is None or self.key.type is not AttentionType.DECODER:
            return 0
        return max(0, query + 1 - self.key.window)

    def _cache_index(self, rows: Tensor | slice, positions: Tensor) -> Tensor:
        """Indices in the cache of the keys at `positions` [N, L] of N rows: [N * num_kv_heads,
        L]."""
        block_size = self.key.block_size
        num_kv_heads = self.key.num_kv_heads
        assert self.batch.block_table is not None and block_size is not None
        table = self.batch.block_table[rows]
        blocks = table.gather(1, positions // block_size).long()
        slots = blocks * (2 * block_size) + positions % block_size
        heads = torch.arange(num_kv_heads, device=self.device)
        return (slots[:, None] * num_kv_heads + heads[:, None]).flatten(0, 1)

    def _device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def split(lengths: np.ndarray) -> list[np.ndarray]:
    """Parts of rows (indices, ascending) such that padding each part to its longest row at most
    doubles the work."""
    order = np.argsort(-lengths, kind="stable")
    parts = []
    while len(order):
        longest = int(lengths[order[0]])
        similar = (
            int(np.count_nonzero(2 * lengths[order] >= longest)) if longest > _SHORT else len(order)
        )
        count = min(similar, max(1, _BUCKET_KEYS // longest))
        parts.append(np.sort(order[:count]))
        order = order[count:]
    return parts
