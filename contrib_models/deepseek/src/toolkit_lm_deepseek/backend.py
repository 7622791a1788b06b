"""LatentBackend: attention over latent vectors, in plain torch, or by kernels where they can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from toolkit_lm.attention import (
    AttentionBackend,
    AttentionCall,
    AttentionSpec,
    AttentionType,
    BatchView,
)
from toolkit_lm.kv import KVCacheSpec, PageTensor
from toolkit_lm_paged_attention import fused_attention
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm_deepseek.params import IndexShape, LatentParams
from toolkit_lm_deepseek.spec import BYTES, LatentSpec

_MOST_PADDED = 2**15
"""Most latents, padding included, that rows of one token read together."""


class Bucket(NamedTuple):
    """Rows of one token that are computed together."""

    tokens: Tensor
    """[R] int64."""
    places: Tensor
    """[R, most keys] int64: indices of the keys in the cache, which is seen as [N, size]."""
    lengths: Tensor
    """[R] int64: keys of each row."""


class Row(NamedTuple):
    """A row of several tokens."""

    tokens: slice
    places: Tensor
    """[keys] int64."""


class Step(NamedTuple):
    """The rows that a step reads, and the places of its tokens."""

    buckets: list[Bucket]
    rows: list[Row]
    padding: list[slice]
    """Tokens without keys."""
    stored: Tensor | None
    """[S] int64: the tokens that are stored. None: all."""
    slots: Tensor
    """[S] int64."""


class LatentBackend(AttentionBackend):
    """Exact attention on any device. A page holds [block_size, size].

    Rows of one token are absorbed: the up-projection to keys is applied to the query, and that to
    values to the sum of latents. Rows of many tokens have their keys and values made of the
    latents. Which of both takes fewer products is decided for each row. Where a layer has an
    indexer, the keys that it leaves out are not seen.
    """

    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        if not isinstance(spec.kv_cache, LatentSpec):
            return "only for layers that keep latent vectors"
        if spec.type != AttentionType.DECODER:
            return f"no attention of type {str(spec.type)!r} to latent vectors"
        if spec.dtype not in BYTES or spec.kv_cache.dtype != spec.dtype:
            return f"no product of {spec.dtype} and latent vectors in {spec.kv_cache.dtype}"
        asked = [
            name
            for name in ("window", "soft_cap", "sinks", "bias", "spans")
            if getattr(spec, name) not in (None, False)
        ]
        return f"latent vectors are read without {', '.join(asked)}" if asked else None

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> list[PageTensor]:
        assert isinstance(spec, LatentSpec)
        return [PageTensor((spec.block_size, spec.size), spec.dtype)]

    def build(self, batch: BatchView) -> Step:
        assert batch.block_table is not None and batch.slot_mapping is not None
        assert self.setup.kv_cache is not None
        size = self.setup.kv_cache.block_size
        table = batch.block_table
        starts = batch.query_start
        lengths = batch.seq_lens
        counts = np.diff(starts)
        padding = [slice(starts[r], starts[r + 1]) for r in np.flatnonzero(lengths == 0)]
        rows = [
            Row(
                slice(int(starts[r]), int(starts[r + 1])),
                _places(table[r : r + 1], int(lengths[r]), size)[0],
            )
            for r in np.flatnonzero((lengths > 0) & (counts > 1))
        ]
        decoding = np.flatnonzero((lengths > 0) & (counts == 1))
        buckets = [
            _bucket(chosen, starts, lengths, table, size)
            for chosen in _buckets(decoding[lengths[decoding].argsort(kind="stable")], lengths)
        ]
        slots = batch.slot_mapping
        if not batch.has_padding:
            return Step(buckets, rows, padding, None, slots)
        stored = slots.ge(0).nonzero()[:, 0]
        return Step(buckets, rows, padding, stored, slots[stored])

    def write_kv(self, call: AttentionCall) -> None:
        assert call.k is not None and call.kv_cache is not None
        step: Step = call.metadata
        kept = call.k[:, 0] if step.stored is None else call.k[step.stored, 0]
        _vectors(call).index_copy_(0, step.slots, kept)

    def forward(self, call: AttentionCall) -> None:
        layer = cast(LatentParams, call.layer)
        step: Step = call.metadata
        cache = _vectors(call)
        for tokens in step.padding:
            call.out[tokens].zero_()
        for number, whole in enumerate(step.buckets):
            bucket = self._narrowed(call, number, whole)
            q = absorbed(layer, call.q[bucket.tokens])
            sums = _attend_bucket(layer, q, cache, bucket)
            call.out.index_copy_(0, bucket.tokens, values_of(layer, sums))
        for number, (tokens, places) in enumerate(step.rows):
            q = call.q[tokens]
            latents = cache.index_select(0, places)
            unseen = _later(len(q), len(latents), q.device)
            chooses = layer.choice is not None and len(latents) > layer.choice.top_k
            if chooses:
                unseen = self._unseen(call, number, tokens, latents, unseen)
            latents = latents[:, : layer.width]
            if layer.expands(len(q), len(latents)):
                mask = ~unseen if chooses or len(q) < len(latents) else None
                call.out[tokens] = _attend_expanded(layer, q, latents, mask)
                continue
            hidden = unseen.repeat_interleave(q.shape[1], 0)
            heads = absorbed(layer, q).flatten(0, 1)
            sums = _attend(heads[None], latents[None], hidden[None], layer)[0]
            call.out[tokens] = values_of(layer, sums.view(*q.shape[:2], -1))

    @staticmethod
    def _narrowed(call: AttentionCall, number: int, bucket: Bucket) -> Bucket:
        """The bucket of that number, with the keys alone that an indexer chooses."""
        layer = cast(LatentParams, call.layer)
        choice = layer.choice
        if choice is None or bucket.places.shape[1] <= choice.top_k:
            return bucket
        if layer.index is not None:
            sought = _sought(call)[bucket.tokens]
            chosen = best_of(layer.index, choice.top_k, sought, _vectors(call), bucket)
            choice.buckets[number] = chosen
        return narrowed(bucket, choice.buckets[number])

    @staticmethod
    def _unseen(
        call: AttentionCall, number: int, tokens: slice, kept: Tensor, later: Tensor
    ) -> Tensor:
        """Which keys, whose vectors are `kept`, the queries of the row of that number do not
        see."""
        layer = cast(LatentParams, call.layer)
        assert layer.choice is not None
        if layer.index is not None:
            keys = kept[:, layer.width :]
            sought = _sought(call)[tokens]
            unseen = unseen_of(layer.index, layer.choice.top_k, sought, keys, later)
            layer.choice.rows[number] = unseen
        return layer.choice.rows[number]


def _sought(call: AttentionCall) -> Tensor:
    """An indexer's queries and weights of heads, in one tensor [T, ...]."""
    assert call.v is not None
    return call.v


def _vectors(call: AttentionCall) -> Tensor:
    """The layer's cache as vectors [N, size]."""
    assert call.kv_cache is not None
    [cache] = call.kv_cache
    return cache.view(-1, cache.shape[-1])


def _places(table: Tensor, most: int, block_size: int) -> Tensor:
    """Indices [rows, most] of the first keys of rows with these block tables, as of
    `_vectors`."""
    blocks = table[:, : -(-most // block_size)].long() * block_size
    within = torch.arange(block_size, device=table.device)
    return (blocks.unsqueeze(-1) + within).flatten(1)[:, :most]


def _buckets(ordered: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Cuts rows, shortest first, so that at most a third of what they read together is padding."""
    start = 0
    total = 0
    for end, row in enumerate(ordered):
        length = int(lengths[row])
        count = end - start + 1
        if end > start and (
            length * count > _MOST_PADDED or 2 * length * count > 3 * (total + length)
        ):
            yield ordered[start:end]
            start = end
            total = 0
        total += length
    if len(ordered) > start:
        yield ordered[start:]


def _bucket(
    chosen: np.ndarray, starts: np.ndarray, lengths: np.ndarray, table: Tensor, block_size: int
) -> Bucket:
    device = table.device
    most = int(lengths[chosen[-1]])
    ends = torch.from_numpy(lengths[chosen].astype(np.int64)).to(device)
    rows = torch.from_numpy(chosen).to(device)
    tokens = torch.from_numpy(starts[chosen].astype(np.int64)).to(device)
    # Entries of a block table past a row's end are valid ids, and what they lead to is hidden.
    return Bucket(tokens, _places(table[rows], most, block_size).contiguous(), ends)


def _later(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Which keys come after which queries, the last ones: [queries, keys] bool."""
    places = torch.arange(num_keys, device=device)
    return places > places[num_keys - num_queries :, None]


def best_of(index: IndexShape, top_k: int, sought: Tensor, cache: Tensor, bucket: Bucket) -> Tensor:
    """Numbers [R, top_k] of keys that the indexer chooses for each row of a bucket, in order."""
    places = bucket.places
    keys = cache.index_select(0, places.flatten())[:, -index.size :].view(*places.shape, -1)
    queries, weights = index_queries(index, sought)
    products = torch.bmm(queries, keys.mT.float()).relu_()
    scores = torch.bmm(weights[:, None], products)[:, 0]
    after = torch.arange(places.shape[1], device=places.device) >= bucket.lengths[:, None]
    return scores.masked_fill_(after, float("-inf")).topk(top_k, -1).indices.sort().values


def narrowed(bucket: Bucket, chosen: Tensor) -> Bucket:
    """A bucket with the `chosen` keys alone."""
    # A row with fewer keys has all of them first.
    lengths = bucket.lengths.clamp(max=chosen.shape[1])
    return Bucket(bucket.tokens, bucket.places.gather(1, chosen), lengths)


def unseen_of(index: IndexShape, top_k: int, sought: Tensor, keys: Tensor, later: Tensor) -> Tensor:
    """Which keys [K, index size] of a row its queries do not see, `later` ones [T, K] among
    them."""
    queries, weights = index_queries(index, sought)
    keys = keys.mT.float()
    scores = torch.zeros(later.shape, device=later.device)
    for head in range(index.num_heads):
        scores.addcmul_((queries[:, head] @ keys).relu_(), weights[:, head, None])
    chosen = scores.masked_fill_(later, float("-inf")).topk(top_k, -1).indices
    return torch.ones_like(later).scatter_(1, chosen, value=False).logical_or_(later)


def index_queries(index: IndexShape, sought: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [T, heads, size] of an indexer, and weights of its heads [T, heads], in float32
    (DeepSeek-AI 2025). `sought`: both in one tensor."""
    queries, weights = torch.split(
        sought.float(), [index.num_heads * index.size, index.num_heads], dim=-1
    )
    return queries.reshape(len(queries), index.num_heads, index.size), weights


def absorbed(layer: LatentParams, q: Tensor) -> Tensor:
    """Queries [T, heads, head_size] -> [T, heads, rank + rotated size], whose products with what is
    cached are the scores."""
    plain, rotated = torch.split(q, [layer.plain_size, layer.rotated_size], dim=-1)
    to_keys, _ = layer.weights()
    return torch.cat([to_keys(plain.transpose(0, 1)).transpose(0, 1), rotated], dim=-1)


def values_of(layer: LatentParams, sums: Tensor) -> Tensor:
    """Weighted sums of latents [T, heads, rank] -> of values [T, heads, value size]."""
    _, to_values = layer.weights()
    return to_values(sums.transpose(0, 1)).transpose(0, 1)


def _attend_bucket(layer: LatentParams, q: Tensor, cache: Tensor, bucket: Bucket) -> Tensor:
    """Absorbed queries [R, N, size] -> sums of the bucket's latents [R, N, rank]."""
    places = bucket.places
    ends = bucket.lengths
    out = torch.empty((*q.shape[:2], layer.rank), dtype=torch.float32, device=q.device)
    whole = layer.index is None
    if whole and layer.kernels.latent_attention(q.float(), cache, places, ends, layer.scale, out):
        return out.to(q.dtype)
    latents = cache.index_select(0, places.flatten()).view(*places.shape, -1)[..., : layer.width]
    hidden = torch.arange(places.shape[1], device=ends.device) >= ends[:, None]
    return _attend(q, latents, hidden[:, None], layer)


def _attend(q: Tensor, latents: Tensor, hidden: Tensor, layer: LatentParams) -> Tensor:
    """Absorbed queries [R, N, size], latents [R, K, size], keys that are not seen [R, 1 or N, K]
    -> sums of latents [R, N, rank]."""
    scores = torch.bmm(q, latents.mT).float().mul_(layer.scale)
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1).to(q.dtype)
    return torch.bmm(weights, latents[..., : layer.rank])


def _attend_expanded(
    layer: LatentParams, q: Tensor, latents: Tensor, mask: Tensor | None
) -> Tensor:
    """Queries [T, heads, head_size] of a row, all its latents [K, size], and which of these are
    seen [T, K] -> [T, heads, value size]. No mask: those before each of as many queries."""
    made = layer.expand(latents[:, : layer.rank].contiguous())
    plain, values = torch.split(made, [layer.plain_size, layer.value_size], dim=-1)
    rotated = latents[:, None, layer.rank :].expand(-1, q.shape[1], -1)
    keys = torch.cat([plain, rotated], dim=-1)
    # The fused kernels of torch take heads of one size.
    widest = max(layer.head_size, layer.value_size)
    q, keys, values = (
        (x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])))
        .transpose(0, 1)
        .unsqueeze(0)
        for x in (q, keys, values)
    )
    options: dict[str, Any] = {"causal": True} if mask is None else {"mask": mask}
    out = fused_attention(q, keys, values, scale=layer.scale, **options)
    return out[0, :, :, : layer.value_size].transpose(0, 1)
