"""Rules about single tokens: allowed_token_ids, bad_words, logit_bias, stop tokens that min_tokens
holds back, and forced tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.sampling.batch import SamplingBatch, TokenRules
from toolkit_lm.sampling.transfer import to_device


def mask(logits: Tensor, rows: SamplingBatch) -> None:
    """Applies the rules to logits [R, V], in place. Rows without rules stay as they are."""
    vocab_size = logits.shape[-1]
    _allow(logits, rows)
    for kind in ("bad_words", "forbidden_texts"):
        forbidding = {
            row: words
            for row, rules in enumerate(rows.rules)
            if (words := getattr(rules, kind)) is not None
        }
        forbidden = {row: words.forbidden(rows.output(row)) for row, words in forbidding.items()}
        _put(logits, forbidden, -torch.inf)
    biased = {row: rules for row, rules in enumerate(rows.rules) if rules.bias is not None}
    if biased:
        values = np.concatenate([rules.bias for rules in biased.values() if rules.bias is not None])
        _put(
            logits,
            {row: rules.bias_ids for row, rules in biased.items() if rules.bias_ids is not None},
            values,
        )
    early = np.flatnonzero(rows.position < rows.min_tokens)
    _put(
        logits,
        {int(row): rows.rules[row].stop[rows.rules[row].stop < vocab_size] for row in early},
        -torch.inf,
    )
    if forced := rows.must_draw():
        places = np.array([*forced, *forced.values()]).reshape(2, -1)
        drawing, tokens = to_device(places, logits.device)
        logits[drawing] = -torch.inf
        logits[drawing, tokens] = 0.0


def _allow(logits: Tensor, rows: SamplingBatch) -> None:
    sharing: dict[TokenRules, list[int]] = {}
    for row, rules in enumerate(rows.rules):
        if rules.allowed is not None:
            sharing.setdefault(rules, []).append(row)
    for rules, members in sharing.items():
        assert rules.allowed is not None
        own = to_device(np.array(members), logits.device)
        index = own[:, None], to_device(rules.allowed, logits.device)
        kept = logits[index]
        logits[own] = -torch.inf
        logits[index] = kept


def _put(logits: Tensor, token_ids: dict[int, np.ndarray], values: float | np.ndarray) -> None:
    """Adds `values` to the logits of each row's tokens. Minus infinity forbids a token."""
    if token_ids:
        added = to_device(np.asarray(values), logits.device).to(logits.dtype)
        logits.index_put_(_index(token_ids, logits.device), added, accumulate=True)


def _index(token_ids: dict[int, np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    rows = np.repeat(list(token_ids), [len(ids) for ids in token_ids.values()])
    return to_device(rows, device), to_device(np.concatenate(list(token_ids.values())), device)
