"""The tokens of many sequences on the host, one row each."""

from __future__ import annotations

import numpy as np


class TokenHistory:
    """Prompt and output tokens of each row; rows have a fixed capacity."""

    def __init__(self, num_rows: int, max_len: int) -> None:
        self.token_ids = np.zeros((num_rows, max_len), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)

    def set(self, row: int, token_ids: list[int], num_prompt_tokens: int) -> None:
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.num_prompt_tokens[row] = num_prompt_tokens

    def append(self, rows: np.ndarray, token_ids: list[int]) -> None:
        """One token for each of `rows` [R]. What a full row gets is counted, but no step will ever read it."""
        ends = self.num_tokens[rows]
        inside = ends < self.token_ids.shape[1]
        self.token_ids[rows[inside], ends[inside]] = np.array(token_ids, np.int32)[inside]
        self.num_tokens[rows] += 1

    def tokens(self, row: int) -> np.ndarray:
        """All tokens of a row: a view, [its number of tokens] int32."""
        return self.token_ids[row, : self.num_tokens[row]]

    def output(self, row: int) -> np.ndarray:
        """The output tokens of a row: a view."""
        return self.token_ids[row, self.num_prompt_tokens[row] : self.num_tokens[row]]

    def padded(self, rows: np.ndarray, *, output_only: bool = False, fill: int) -> np.ndarray:
        """[R, longest] int64, left-aligned: all tokens of `rows`, or their output; `fill` elsewhere."""
        ends = self.num_tokens[rows][:, None]
        starts = self.num_prompt_tokens[rows][:, None] if output_only else 0
        positions = np.arange(int(ends.max()))
        return np.where((positions >= starts) & (positions < ends), self.token_ids[rows, : len(positions)], fill).astype(np.int64)
