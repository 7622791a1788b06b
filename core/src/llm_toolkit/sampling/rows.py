"""Sampling parameters of many sequences as columns, one row each."""

from __future__ import annotations

import numpy as np

from llm_toolkit.params import SamplingParams


class SamplingRows:
    """Columns over rows: what `sample` needs of each sequence. Rows are set when a sequence joins the batch, and picked per step."""

    def __init__(self, num_rows: int) -> None:
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_p = np.ones(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        """0: all."""
        self.min_p = np.zeros(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.uint64)
        self.position = np.zeros(num_rows, np.int64)
        """Output tokens drawn so far: the counter of the random numbers."""
        self.min_tokens = np.zeros(num_rows, np.int64)
        self.logprobs = np.full(num_rows, -1, np.int64)
        """Alternatives wanted; -1: no logprobs at all."""
        self.stop_token_ids: list[list[int]] = [[] for _ in range(num_rows)]

    def set(self, row: int, params: SamplingParams, seed: int, stop_token_ids: list[int], position: int) -> None:
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = max(params.top_k, 0)
        self.min_p[row] = params.min_p
        self.seed[row] = seed
        self.position[row] = position
        self.min_tokens[row] = params.min_tokens
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.stop_token_ids[row] = stop_token_ids

    def pick(self, rows: np.ndarray) -> SamplingRows:
        """The given rows [R], as columns of their own."""
        picked = object.__new__(SamplingRows)
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "position", "min_tokens", "logprobs"):
            setattr(picked, name, getattr(self, name)[rows])
        picked.stop_token_ids = [self.stop_token_ids[row] for row in rows]
        return picked
