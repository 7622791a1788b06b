"""The persistent batch: what the runner remembers of each live sequence between steps, and a step's flat inputs made from it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from toolkit_lm.messages import NewSequence, StepPlan
from toolkit_lm.sampling import ProcessorTable, SamplingBatch, TokenHistory


class StepInputs(NamedTuple):
    """One step's flat batch on the host: R rows in the plan's order, T tokens."""

    rows: np.ndarray
    """[R] the persistent row of each."""
    input_ids: np.ndarray
    """[T] int64."""
    positions: np.ndarray
    """[T] int64."""
    query_start: np.ndarray
    """[R + 1] int32."""
    seq_lens: np.ndarray
    """[R] int32."""
    slot_mappings: list[np.ndarray]
    """Per KV group, [T] int64."""
    block_tables: list[np.ndarray]
    """Per KV group, [R, most blocks] int32."""
    sampling: np.ndarray
    """Indices into `rows` of those that draw a token."""


class PersistentBatch:
    """Rows of fixed capacity; a sequence keeps its row while it lives."""

    def __init__(self, num_rows: int, max_model_len: int, block_sizes: list[int], processors: ProcessorTable | None = None) -> None:
        """`block_sizes`: per KV group. `processors`: the plugins' logits processors, where sequences may ask for them."""
        self.block_sizes = block_sizes
        self.row_of: dict[int, int] = {}
        """By seq_id."""
        self.history = TokenHistory(num_rows, max_model_len)
        self.sampling = SamplingBatch(self.history, processors)
        self.num_prompt_logprobs = np.zeros(num_rows, np.int64)
        """Per row, prompt tokens whose log probabilities are known."""
        self._free_rows = list(range(num_rows))[::-1]
        self._num_computed = np.zeros(num_rows, np.int64)
        self._block_tables = [np.zeros((num_rows, -(-max_model_len // size)), np.int32) for size in block_sizes]
        self._num_blocks = np.zeros((len(block_sizes), num_rows), np.int64)

    def apply(self, plan: StepPlan) -> None:
        """Takes in what a plan says of sequences that leave, join and grow."""
        for seq_id in plan.dropped:
            # A plan that was interrupted may name a sequence that never came here.
            if (row := self.row_of.pop(seq_id, None)) is not None:
                self._free_rows.append(row)
                self.sampling.clear(row)
        for move in plan.moves:
            self._block_tables[move.group][self.row_of[move.seq_id], move.index] = move.block
        new: set[int] = set()
        for seq in plan.new:
            self._add(seq)
            new.add(seq.seq_id)
        for scheduled in plan.scheduled:
            if scheduled.seq_id not in new:
                for group, blocks in enumerate(scheduled.new_blocks):
                    if blocks:
                        self._append_blocks(self.row_of[scheduled.seq_id], group, blocks)

    def inputs(self, plan: StepPlan) -> StepInputs:
        """The flat batch of a plan, and the computed counts advanced past it."""
        row_list, counts, sampling = [], [], []
        for index, scheduled in enumerate(plan.scheduled):
            row_list.append(self.row_of[scheduled.seq_id])
            counts.append(scheduled.num_tokens)
            if scheduled.samples:
                sampling.append(index)
        rows, num_tokens = np.array(row_list, np.int64), np.array(counts, np.int64)
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(num_tokens, out=query_start[1:])
        row_of_token = np.repeat(rows, num_tokens)
        starts = self._num_computed[rows]
        positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], num_tokens)
        self._num_computed[rows] += num_tokens
        seq_lens = self._num_computed[rows].astype(np.int32)
        longest = int(seq_lens.max())
        slot_mappings, block_tables = [], []
        for table, size in zip(self._block_tables, self.block_sizes, strict=True):
            slot_mappings.append(table[row_of_token, positions // size].astype(np.int64) * size + positions % size)
            block_tables.append(table[rows, : -(-longest // size)])
        return StepInputs(
            rows=rows,
            input_ids=self.history.token_ids[row_of_token, positions].astype(np.int64),
            positions=positions,
            query_start=query_start,
            seq_lens=seq_lens,
            slot_mappings=slot_mappings,
            block_tables=block_tables,
            sampling=np.array(sampling, np.int64),
        )

    def append_tokens(self, rows: np.ndarray, token_ids: list[int]) -> None:
        """Remembers the tokens drawn for `rows`, the inputs of a later step."""
        self.history.append(rows, token_ids)
        self.sampling.position[rows] += 1

    def _add(self, seq: NewSequence) -> None:
        row = self._free_rows.pop()
        self.row_of[seq.seq_id] = row
        self.history.set(row, seq.token_ids, seq.num_prompt_tokens)
        self._num_computed[row] = seq.num_computed_tokens
        self._num_blocks[:, row] = 0
        for group, blocks in enumerate(seq.block_tables):
            self._append_blocks(row, group, blocks)
        self.num_prompt_logprobs[row] = seq.num_prompt_logprobs
        self.sampling.set(row, seq)

    def _append_blocks(self, row: int, group: int, blocks: list[int]) -> None:
        start = self._num_blocks[group, row]
        self._block_tables[group][row, start : start + len(blocks)] = blocks
        self._num_blocks[group, row] += len(blocks)
