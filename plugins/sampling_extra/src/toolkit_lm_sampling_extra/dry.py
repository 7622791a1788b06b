"""DRY, "don't repeat yourself": a token that would go on with a repetition is the less likely the
longer the repetition is.

As its author states it (p-e-w, text-generation-webui, pull request 5677).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.sampling import LogitsProcessor, ProcessorRow
from torch import Tensor

_LONGEST = 50
"""Longer repetitions count as this: the penalty is far beyond any logit by then."""


class _Arguments(NamedTuple):
    multiplier: float
    base: float
    allowed_length: int
    breakers: np.ndarray
    """[N + 2] bool: by token id plus one, up to the largest that breaks. Others do not."""


class Dry(LogitsProcessor):
    """Subtracts multiplier * base ** (length - allowed_length) from the logit of a token that
    continues a repetition of `length` tokens."""

    stage = "logits"
    verifies_drafts = True

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._arguments: dict[int, _Arguments] = {}

    def add(
        self, row: ProcessorRow, arguments: Mapping[str, Any], state: Mapping[str, float]
    ) -> None:
        found = np.array(arguments["breakers"], np.int64)
        breakers = np.zeros(max(found, default=-1) + 3, bool)
        breakers[found + 1] = True
        multiplier = np.float32(arguments["multiplier"])
        base = np.float32(arguments["base"])
        # No repetition counts as longer than _LONGEST, and no array holds larger integers than 64
        # bits.
        self._arguments[row.key] = _Arguments(
            float(multiplier), float(base), min(arguments["allowed_length"], 2**31), breakers
        )

    def remove(self, key: int) -> None:
        self._arguments.pop(key, None)

    def apply(self, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        users = [self._arguments[row.key] for row in rows]
        row, token, length = _repetitions(
            [row.token_ids for row in rows], [user.breakers for user in users]
        )
        excess = length - np.array([user.allowed_length for user in users], np.int64)[row]
        row, token, excess = row[excess >= 0], token[excess >= 0], excess[excess >= 0]
        # Float64 holds 1000 * 100 ** 50; a penalty that float32 does not is infinite, and rules the
        # token out.
        multiplier, base = (
            np.array(factor, np.float64)
            for factor in zip(*((user.multiplier, user.base) for user in users), strict=True)
        )
        penalties = multiplier[row] * base[row] ** excess
        total = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
        flat = torch.from_numpy(row * values.shape[-1] + token).to(values.device)
        # A token that goes on with several repetitions is judged by the longest.
        total.view(-1).scatter_reduce_(
            0, flat, torch.from_numpy(penalties).to(values.device), "amax"
        )
        return values - total.to(values.dtype)


def _repetitions(
    sequences: list[np.ndarray], breakers: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(index of the sequence, next token, length) of each earlier place that matches the end of its
    sequence."""
    ends = np.array([len(line) for line in sequences]) - 1
    tokens = np.full((len(sequences), ends.max() + 1), -1, np.int64)
    for padded, line in zip(tokens, sequences, strict=True):
        padded[: len(line)] = line
    broken = np.stack(
        [own.take(line + 1, mode="clip") for line, own in zip(tokens, breakers, strict=True)]
    )
    index = np.arange(len(sequences))
    # The last token itself is no earlier place, and across a breaker nothing is repeated.
    same = (tokens == tokens[index, ends][:, None]) & ~broken
    same[index, ends] = False
    row, place = np.nonzero(same)
    following = tokens[row, place + 1]
    kept = ~broken[row, place + 1]
    row, place, following = row[kept], place[kept], following[kept]
    length = np.ones(len(row), np.int64)
    alive = np.arange(len(row))
    for back in range(1, _LONGEST):
        alive = alive[place[alive] >= back]
        before = place[alive] - back
        expected = ends[row[alive]] - back
        matches = (tokens[row[alive], before] == tokens[row[alive], expected]) & ~broken[
            row[alive], before
        ]
        alive = alive[matches]
        if not len(alive):
            break
        length[alive] += 1
    return row, following, length
