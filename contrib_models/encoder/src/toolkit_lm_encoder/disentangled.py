"""Disentangled attention (He et al. 2021: DeBERTa): scores add products of contents with learned
vectors of distances.

score[i, j] = (q[i] k[j] + q[i] pos_k[d] + k[j] pos_q[d]) / sqrt(terms * head size), where d is the
bucket of i - j.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from toolkit_lm.attention import BatchView, CacheBackend, CacheLayer, current
from toolkit_lm.kv import KVCacheSpec, PageTensor
from torch import Tensor

_MOST_SCORES = 2**24
"""Scores of a layer that are computed at a time."""


class EqualRows(NamedTuple):
    """Sequences of a step that are equally long."""

    tokens: Tensor
    """Indices in the flat batch [rows, length], int64."""
    num_seen: int
    """Keys that each token sees: the first ones of its sequence."""


class WholeSequences(CacheBackend):
    """Metadata for layers that read whole sequences and cache nothing: a list of EqualRows."""

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> Sequence[PageTensor]:
        raise NotImplementedError("these layers cache nothing")

    def build(self, batch: BatchView) -> list[EqualRows]:
        groups: dict[tuple[int, int], list[int]] = {}
        lengths = np.diff(batch.query_start)
        for start, length, seen in zip(batch.query_start, lengths, batch.seq_lens, strict=False):
            if length and seen:
                groups.setdefault((int(length), int(seen)), []).append(int(start))
        found = []
        for (length, seen), starts in groups.items():
            tokens = torch.tensor(starts)[:, None] + torch.arange(length)
            found.append(EqualRows(tokens.to(self.setup.device, non_blocking=True), seen))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Distances:
    """Buckets of distances: as they are up to half of `buckets`, then by logarithm."""

    buckets: int
    """Buckets of one side; 0: each distance has its own."""
    most: int
    """Distances from here on share the last bucket."""

    @property
    def span(self) -> int:
        """Vectors of one side."""
        return self.buckets or self.most

    def index(self, length: int, device: torch.device) -> Tensor:
        """The vector of each query and key of a sequence: [length, length] int64."""
        positions = torch.arange(length, device=device)
        index = self._buckets(torch.arange(1 - length, length, device=device)) + self.span
        index = index.clamp(0, 2 * self.span - 1)
        return index[positions[:, None] - positions + length - 1]

    def _buckets(self, offsets: Tensor) -> Tensor:
        if not self.buckets:
            return offsets
        half = self.buckets // 2
        distance = offsets.abs().clamp(min=half - 1)
        # In float32 and in this order, as the models were trained: at borders it decides.
        far = torch.log(distance / half) / torch.log(torch.tensor((self.most - 1) / half))
        far = torch.ceil(far * (half - 1)) + half
        return torch.where(distance <= half, offsets.float(), far * offsets.sign()).long()


class DisentangledAttention(CacheLayer):
    """Bidirectional attention over whole sequences: q, k, v [T, heads * head size] -> as q. Head
    counts are this rank's.

    `pos_k` and `pos_q` [2 * span, heads * head size] are keys and queries of distances; None: the
    term is left out.
    """

    backend = WholeSequences

    def __init__(
        self, num_heads: int, head_size: int, distances: Distances, terms: int, *, prefix: str
    ) -> None:
        super().__init__(prefix)
        self.num_heads = num_heads
        self.head_size = head_size
        self.distances = distances
        self.scale = 1 / math.sqrt(terms * head_size)

    @property
    def one_way(self) -> bool:
        return False

    def kv_cache_spec(self) -> KVCacheSpec | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, pos_k: Tensor | None, pos_q: Tensor | None
    ) -> Tensor:
        nothing = q.new_empty(0)
        positions = [nothing if x is None else x for x in (pos_k, pos_q)]
        return self.run(q, k, v, *positions, out=torch.empty_like(q))

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        q, k, v, *positions = inputs
        _, groups = current(self.prefix)
        pos_k, pos_q = (
            x.view(len(x), self.num_heads, -1).permute(1, 2, 0) if x.numel() else None
            for x in positions
        )
        rows: EqualRows
        for rows in groups:
            length = rows.tokens.shape[1]
            index = self.distances.index(length, q.device)
            at_once = max(1, _MOST_SCORES // (self.num_heads * length * length))
            for tokens in torch.split(rows.tokens, at_once):
                queries, keys, values = (
                    x[tokens].view(*tokens.shape, self.num_heads, -1).transpose(1, 2)
                    for x in (q, k, v)
                )
                scores = self._scores(queries, keys, pos_k, pos_q, index)
                if rows.num_seen < length:
                    scores[..., rows.num_seen :] = -math.inf
                attended = scores.softmax(-1).to(v.dtype) @ values
                out[tokens] = attended.transpose(1, 2).flatten(2)

    def _scores(
        self, q: Tensor, k: Tensor, pos_k: Tensor | None, pos_q: Tensor | None, index: Tensor
    ) -> Tensor:
        """Scores [N, heads, length, length] float32 of sequences of one length: q, k [N, heads,
        length, head size], of distances [heads, head size, 2 * span]."""
        scores = (q @ k.transpose(-1, -2)).float()
        index = index.expand(scores.shape)
        if pos_k is not None:
            scores += (q @ pos_k).float().gather(-1, index)
        if pos_q is not None:
            # Rows are keys here, so each finds the vector of the query's distance.
            scores += (k @ pos_q).float().gather(-1, index.transpose(-1, -2)).transpose(-1, -2)
        return scores.mul_(self.scale)
