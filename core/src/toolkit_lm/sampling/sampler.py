"""The sampler: logits [R, V] and the rows' parameters become one token per row.

The steps, in order; each works on what the one before has left, and only on the rows that ask for
it:

1. masks: allowed_token_ids, bad_words, logit_bias, and the stop tokens that min_tokens holds back;
2. penalties: repetition, presence, frequency;
3. plugins' logits processors of the stage "logits";
4. greedy rows (temperature 0) take the likeliest token, the first of equals;
5. temperature;
6. filters: top-k, top-p, min-p;
7. plugins' logits processors of the stage "probs";
8. one draw by inverse distribution function, from one uniform number per row.

A row's result is a function of its logits, parameters, tokens and seed (and its processors' state),
and never of the other rows. Rows may be positions of one sequence: one after its tokens, and one
after each of its drafts. On a GPU this holds but for the last bit: a single row is summed up in
another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.messages import SamplerState, TokenLogprobs
from toolkit_lm.params import SamplingParams, leave_too_little
from toolkit_lm.sampling.batch import MIN_TEMPERATURE, SamplingBatch
from toolkit_lm.sampling.filters import column, distribution
from toolkit_lm.sampling.logprobs import token_logprobs
from toolkit_lm.sampling.masks import mask
from toolkit_lm.sampling.penalties import penalize
from toolkit_lm.sampling.processors import ProcessorTable
from toolkit_lm.sampling.transfer import to_device, to_host
from toolkit_lm.sampling.uniform import uniform


def _likeliest(scores: Tensor) -> tuple[Tensor, Tensor]:
    return torch.max(scores, dim=-1)


_NOT_FINITE = "the model's logits are not finite"


class Sampled(NamedTuple):
    """Result of one draw for R rows."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    """Empty when no row asked."""
    errors: dict[int, str]
    """Messages by row: logits that hold NaN, or allow no token; a plugin's logits processor that
    failed."""
    states: dict[int, SamplerState]
    """State of the logits processors for the next draw, by row."""


def sample(
    logits: Tensor,
    rows: SamplingBatch,
    likeliest: Callable[[Tensor], tuple[Tensor, Tensor]] = _likeliest,
) -> Sampled:
    """Draws a token for each row of logits [R, V], any float dtype. The logits are left as they
    are. `likeliest` is as that of Kernels."""
    # Where no sequence uses any, a step costs nothing more.
    processors = rows.processors if rows.processors is not None and rows.processors.names else None
    scores = _edited(logits, rows, processors)
    best, token_ids = likeliest(scores)
    # max() passes NaN on, and is -inf where no token is allowed.
    failed = ~torch.isfinite(best)
    probs: dict[int, float] = {}
    if rows.temperature.max() >= MIN_TEMPERATURE:
        random = np.flatnonzero(rows.temperature >= MIN_TEMPERATURE)
        if processors is not None:
            # They are shown no row that has failed.
            random = random[~failed.cpu().numpy()[random]]
        index = to_device(random, logits.device)
        part, selected = (
            (scores, rows) if len(random) == len(rows) else (scores[index], rows.select(random))
        )
        tokens, drawn, none_left, processed = _draw(part.float(), selected, processors)
        if processed is not None:
            scores = scores.float().index_copy(0, index, processed)
        # Tokens of a row that has failed are never used.
        token_ids[index] = torch.where(failed[index], token_ids[index], tokens)
        failed[index] |= none_left
        if drawn is not None:
            probs = dict(zip(random.tolist(), drawn.tolist(), strict=True))
    on_host, failed = to_host(token_ids, failed)
    without = failed.nonzero()[:, 0].tolist()
    errors = (
        {row: _why_none(logits[row], rows.rules[row].params) for row in without} if without else {}
    )
    states: dict[int, SamplerState] = {}
    drawn_ids = on_host.tolist()
    if processors is not None:
        keys = rows.key.tolist()
        states = processors.after_draw(keys, rows.processor_row, drawn_ids, probs)
        errors |= {
            row: processors.errors[key] for row, key in enumerate(keys) if key in processors.errors
        }
        if processors.failed_drafts:
            positions = zip(keys, rows.num_drafts.tolist(), strict=True)
            for row, position in enumerate(positions):
                if position in processors.failed_drafts:
                    errors[row] = "a logits processor failed after a draft"
            processors.failed_drafts.clear()
    if rows.logprobs.max() < 0:
        return Sampled(drawn_ids, [], errors, states)
    if rows.logprobs_mode.startswith("processed"):
        logits = scores
    elif processors is not None and (changed := processors.in_logprobs(rows.key.tolist())):
        logits = logits.float().index_copy(
            0, to_device(np.array(changed), logits.device), scores[changed].float()
        )
    logprobs = _logprobs(logits, token_ids, rows)
    return Sampled(drawn_ids, logprobs, errors, states)


def greedy_sample(best: Tensor, token_ids: Tensor) -> Sampled:
    """Result of `sample` for rows that take the likeliest token. `best` [R]: the greatest logit of
    each row. `token_ids` [R]: its token."""
    errors = {}
    if best.device.type != "cpu":
        best, token_ids = to_host(best, token_ids)
    # No sum of finite float32 is too large for a double.
    if not math.isfinite(sum(best.tolist())):
        errors = dict.fromkeys((~torch.isfinite(best)).nonzero()[:, 0].tolist(), _NOT_FINITE)
    return Sampled(token_ids.tolist(), [], errors, {})


def _edited(logits: Tensor, rows: SamplingBatch, processors: ProcessorTable | None) -> Tensor:
    """The logits as `_edit` leaves them, in float32; the same where it leaves all as they are."""
    # The stop tokens are held back while fewer than min_tokens are out.
    edits = (
        rows.edited | (rows.position < rows.min_tokens) if rows.min_tokens.any() else rows.edited
    )
    if rows.forces.any():
        edits = edits | np.isin(np.arange(len(rows)), list(rows.must_draw()))
    edited = np.flatnonzero(edits)
    if not len(edited):
        return logits
    scores = logits.to(torch.float32, copy=True)
    if len(edited) == len(rows):
        return _edit(scores, rows, processors)
    index = to_device(edited, logits.device)
    some = _edit(scores.index_select(0, index), rows.select(edited), processors)
    return scores.index_copy_(0, index, some)


def _edit(logits: Tensor, rows: SamplingBatch, processors: ProcessorTable | None) -> Tensor:
    """The steps that come before greedy rows take the likeliest token. In place."""
    mask(logits, rows)
    penalize(logits, rows)
    if processors is not None:
        processors.apply(logits, rows.key.tolist(), rows.processor_row, "logits")
    return logits


def _draw(
    logits: Tensor, rows: SamplingBatch, processors: ProcessorTable | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """[R, V] float32 -> [R] tokens; [R] what they were drawn with, where processors want to know;
    [R] where nothing was left to draw; [R, V] what a mode "processed" tells of them."""
    probs = distribution(logits, rows)
    if processors is not None:
        processors.apply(probs, rows.key.tolist(), rows.processor_row, "probs")
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    u = to_device(uniform(rows.seed, rows.position, work=rows.work), probs.device)[:, None]
    # The first token whose cumulative probability exceeds u of the whole.
    token_ids = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).clamp_(
        max=probs.shape[-1] - 1
    )
    drawn = (
        None
        if processors is None
        else probs.gather(-1, token_ids)[:, 0].double() / cumulative[:, -1]
    )
    processed = None
    if rows.logprobs_mode == "processed_logprobs":
        processed = probs.log()
    elif rows.logprobs_mode == "processed_logits":
        processed = (logits / column(rows.temperature, logits)).masked_fill(probs <= 0, -math.inf)
    return token_ids[:, 0], drawn, ~(cumulative[:, -1] > 0), processed


def _why_none(logits: Tensor, params: SamplingParams) -> str:
    is_finite = torch.isfinite(logits.max())
    return leave_too_little(params, "no token that could be drawn") if is_finite else _NOT_FINITE


def _logprobs(logits: Tensor, token_ids: Tensor, rows: SamplingBatch) -> list[TokenLogprobs | None]:
    asking = np.flatnonzero(rows.logprobs >= 0)
    index = to_device(asking, logits.device)
    found = iter(
        token_logprobs(
            logits[index],
            token_ids[index],
            rows.logprobs[asking],
            rows.logprob_token_ids[asking],
            mode=rows.logprobs_mode,
        )
    )
    return [next(found) if count >= 0 else None for count in rows.logprobs.tolist()]
