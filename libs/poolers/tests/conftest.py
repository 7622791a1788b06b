"""Batches of pooling rows, and how a pooler is driven over the chunks of their prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm_poolers import PoolingMetadata, PoolingRow, RowPooler
from torch import Tensor

Run = Callable[..., list[Tensor]]


def pool_in_chunks(
    pooler: RowPooler,
    prompts: Sequence[Tensor],
    params: Sequence[PoolingParams] | PoolingParams,
    cuts: Sequence[Sequence[int]] | None = None,
    token_ids: Sequence[np.ndarray] | None = None,
    between: int = 0,
    starts: Sequence[int] | None = None,
) -> list[Tensor]:
    """Outputs of a pooler for `prompts` ([n, H] hidden states each).

    `cuts`: where each prompt is cut into chunks; a step takes the next chunk of each. `between`:
    tokens without a request in front of each row. `starts`: for each prompt, the position of the
    first token that is pooled."""
    wanted = [params] * len(prompts) if isinstance(params, PoolingParams) else list(params)
    bounds = [[0, *(cuts[i] if cuts else ()), len(prompt)] for i, prompt in enumerate(prompts)]
    states: list[dict[str, object]] = [{} for _ in prompts]
    results: list[Tensor | None] = [None] * len(prompts)
    for step in range(max(len(b) for b in bounds) - 1):
        members = [i for i, b in enumerate(bounds) if step + 1 < len(b)]
        pieces = []
        rows = []
        offset = 0
        for i in members:
            start = bounds[i][step]
            stop = bounds[i][step + 1]
            pieces += [
                torch.full((between, prompts[i].shape[1]), float("nan"), dtype=prompts[i].dtype),
                prompts[i][start:stop],
            ]
            offset += between
            ids = token_ids[i][start:stop] if token_ids else np.zeros(stop - start, np.int32)
            tokens = slice(offset, offset + stop - start)
            rows.append(
                PoolingRow(
                    params=wanted[i],
                    tokens=tokens,
                    token_ids=ids,
                    start=start,
                    num_prompt_tokens=len(prompts[i]),
                    pooling_start=starts[i] if starts else 0,
                    state=states[i],
                )
            )
            offset += stop - start
        outcome = pooler(torch.cat(pieces), PoolingMetadata(rows))
        for i, row, result in zip(members, rows, outcome, strict=True):
            assert (result is not None) == row.finished
            results[i] = result
    assert all(not state for state in states), "a state outlives its prompt"
    return [result for result in results if result is not None]


@pytest.fixture
def run() -> Run:
    return pool_in_chunks
