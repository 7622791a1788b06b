"""The sampler: logits [R, V] and the rows' parameters become one token per row.

Order of the filters: temperature, top-k, top-p, min-p, as in transformers. Each row's result is independent of the other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llm_toolkit.messages import TokenLogprobs
from llm_toolkit.sampling.rows import SamplingRows
from llm_toolkit.sampling.uniform import uniform

# Below this a temperature divides float32 logits into infinities, and the draw is the likeliest token anyway.
_MIN_TEMPERATURE = 1e-5


class Sampled(NamedTuple):
    """What a step drew."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    """Empty when no row asked."""
    errors: dict[int, str]
    """By row: logits that hold NaN, or allow no token."""


def sample(logits: Tensor, rows: SamplingRows) -> Sampled:
    """Draws a token for each row of logits [R, V], any float dtype. The logits may be changed in place."""
    raw = logits
    logits = _suppress_stops(logits, rows)
    best, token_ids = logits.max(dim=-1)
    random = np.flatnonzero(rows.temperature >= _MIN_TEMPERATURE)
    if len(random):
        index = torch.from_numpy(random).to(logits.device)
        token_ids[index] = _draw(logits[index].float(), rows.pick(random))
    # max() passes NaN on, and is -inf where no token is allowed.
    errors = {row: _why_none(raw[row]) for row in (~torch.isfinite(best)).nonzero()[:, 0].tolist()}
    return Sampled(token_ids.tolist(), _logprobs(raw, token_ids, rows.logprobs), errors)


def _why_none(logits: Tensor) -> str:
    if torch.isfinite(logits.max()):
        return "min_tokens and stop_token_ids leave no token that could be drawn"
    return "the model's logits are not finite"


def _suppress_stops(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Rules out the tokens that would end a row before its min_tokens are out."""
    early = np.flatnonzero(rows.position < rows.min_tokens)
    if not len(early):
        return logits
    logits = logits.clone()
    for row in early:
        logits[row, [t for t in rows.stop_token_ids[row] if t < logits.shape[-1]]] = -torch.inf
    return logits


def _draw(logits: Tensor, rows: SamplingRows) -> Tensor:
    """[R, V] float32 -> [R]: one draw by inverse distribution function from one uniform number per row."""
    device = logits.device
    # Shifting by the maximum first keeps tiny temperatures finite.
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / torch.from_numpy(rows.temperature).to(device)[:, None]
    u = torch.from_numpy(uniform(rows.seed, rows.position)).to(device)[:, None]
    top_k = np.where(rows.top_k > 0, np.minimum(rows.top_k, logits.shape[-1]), logits.shape[-1])
    if (top_k == logits.shape[-1]).all() and (rows.top_p >= 1).all() and (rows.min_p <= 0).all():
        return _inverse(torch.softmax(logits, dim=-1), u)
    # Rows are drawn from their sorted distribution whenever one of them needs it: a row's draw must not depend on which others do,
    # so rows that need no sorting are drawn apart.
    plain = (top_k == logits.shape[-1]) & (rows.top_p >= 1) & (rows.min_p <= 0)
    tokens = torch.empty(len(plain), dtype=torch.int64, device=device)
    sorted_rows = torch.from_numpy(np.flatnonzero(~plain)).to(device)
    if plain.any():
        plain_rows = torch.from_numpy(np.flatnonzero(plain)).to(device)
        tokens[plain_rows] = _inverse(torch.softmax(logits[plain_rows], dim=-1), u[plain_rows])
    tokens[sorted_rows] = _draw_filtered(logits[sorted_rows], rows.pick(np.flatnonzero(~plain)), top_k[~plain], u[sorted_rows])
    return tokens


def _draw_filtered(logits: Tensor, rows: SamplingRows, top_k: np.ndarray, u: Tensor) -> Tensor:
    """Draws under top-k, top-p and min-p: each keeps a prefix of the tokens sorted by probability."""
    device = logits.device
    logits, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=device)
    logits = logits.masked_fill(ranks >= torch.from_numpy(top_k).to(device)[:, None], -torch.inf)
    probs = torch.softmax(logits, dim=-1)
    before = probs.cumsum(dim=-1, dtype=torch.float64) - probs
    dropped = before >= torch.from_numpy(rows.top_p).to(device)[:, None]
    # 1.0 keeps all: rounding must not cut the tail off.
    dropped &= torch.from_numpy(rows.top_p < 1).to(device)[:, None]
    dropped |= probs < torch.from_numpy(rows.min_p).to(device)[:, None] * probs[:, :1]
    dropped[:, 0] = False
    return order.gather(-1, _inverse(probs.masked_fill(dropped, 0.0), u)[:, None])[:, 0]


def _inverse(weights: Tensor, u: Tensor) -> Tensor:
    """weights [R, V] (not normalised), u [R, 1] in [0, 1) -> [R]: the first token whose cumulative weight exceeds u of the whole."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    token_ids = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)[:, 0]
    return token_ids.clamp_(max=weights.shape[-1] - 1)


def _logprobs(logits: Tensor, token_ids: Tensor, wanted: np.ndarray) -> list[TokenLogprobs | None]:
    """Per row, the log probability of its token and of the likeliest `wanted` ones, before any sampling parameter."""
    asking = np.flatnonzero(wanted >= 0)
    if not len(asking):
        return []
    index = torch.from_numpy(asking).to(logits.device)
    logprobs = torch.log_softmax(logits[index].float(), dim=-1)
    chosen = token_ids[index][:, None]
    chosen_logprobs = logprobs.gather(-1, chosen)
    ranks = ((logprobs > chosen_logprobs).sum(dim=-1) + 1).tolist()
    top = logprobs.topk(min(int(wanted.max()), logprobs.shape[-1]), dim=-1)
    rows: list[TokenLogprobs | None] = [None] * len(wanted)
    columns = zip(
        asking.tolist(),
        chosen[:, 0].tolist(),
        chosen_logprobs[:, 0].tolist(),
        ranks,
        top.indices.tolist(),
        top.values.tolist(),
        strict=True,
    )
    for row, token, logprob, rank, top_ids, top_values in columns:
        count = int(wanted[row])
        rows[row] = TokenLogprobs([token, *top_ids[:count]], [logprob, *top_values[:count]], rank)
    return rows
