"""The persistent batch: the runner's state of each live sequence between steps, and a step's flat
inputs, at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.attention import BatchLimits, BatchView
from toolkit_lm.kv import KVCacheSpec
from toolkit_lm.messages import NewEncoder, NewSequence, StepPlan
from toolkit_lm.model.compiler import GraphShape
from toolkit_lm.sampling import ProcessorTable, SamplingBatch, TokenHistory
from toolkit_lm.step import EncoderBatch, GroupInputs, StepInputs


class Buffer:
    """One input: an array on the host, and a tensor on the device. On a CPU they share memory."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.mirror = torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")
        """Host tensor whose memory `host` views. Pinned for a GPU."""
        self.host: np.ndarray = self.mirror.numpy()
        self._tensor = (
            self.mirror if device.type == "cpu" else torch.zeros(*shape, dtype=dtype, device=device)
        )
        self._size = tuple(shape)
        self._view = self._tensor
        self._rows = self._tensor, self.mirror

    def upload(self, *size: int, changed: bool = True) -> Tensor:
        """Returns a view on the device of the host's values, up to `size` along the first axes.

        Values are copied only if they have `changed` since the last call. The copy runs after the
        work queued on the device, and reads the host's memory at that time.
        """
        if size != self._size:
            self._size = size
            self._view = self._tensor[tuple(map(slice, size))]
            self._rows = self._tensor[: size[0]], self.mirror[: size[0]]
        if changed and self._tensor is not self.mirror:
            # Whole rows: torch copies tensors with gaps through pageable memory, and blocks on
            # that.
            tensor, mirror = self._rows
            tensor.copy_(mirror, non_blocking=True)
        return self._view


class GroupBuffers:
    """The inputs of one KV group. A group that caches nothing has sequence lengths only."""

    def __init__(self, limits: BatchLimits, table_width: int, device: torch.device) -> None:
        self.seq_lens = Buffer((limits.num_rows,), torch.int32, device)
        self.slots = Buffer((limits.num_tokens,), torch.int64, device)
        self.table = Buffer((limits.num_rows, table_width), torch.int32, device)
        self.table_changed = True
        """The host's block table differs from the device's."""


class StepBuffers:
    """Input buffers, allocated once for the largest step. Each step uses their beginnings, so that
    a captured graph can read them.

    A step waits for `uploaded`, writes to the arrays on the host, and calls `upload` once. Plain
    arrays stay on the host.
    """

    def __init__(
        self, limits: BatchLimits, table_widths: Sequence[int], device: torch.device
    ) -> None:
        """`table_widths`: most entries of a block table, per KV group."""
        self.limits = limits
        self.input_ids = Buffer((limits.num_tokens,), torch.int64, device)
        self.positions = Buffer((limits.num_tokens,), torch.int64, device)
        self.query_start = Buffer((limits.num_rows + 1,), torch.int32, device)
        self.groups = [GroupBuffers(limits, width, device) for width in table_widths]
        self.columns = np.zeros((6, limits.num_rows), np.int64)
        self._index = np.zeros(limits.num_tokens, np.int64)
        self._found = np.zeros(limits.num_tokens, np.int32)
        self._device = device
        cuda: Any = torch.cuda
        self.uploaded = cuda.Event() if device.type == "cuda" else None
        """Event after the last step's copies to the device. Earlier host writes have been copied
        when it is done."""

    def gather(self, table: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Returns table[rows, columns] of an int32 table, as int64. The result is valid until the
        next call."""
        index = self._index[: len(rows)]
        found = self._found[: len(rows)]
        np.multiply(rows, table.shape[1], out=index)
        index += columns
        np.take(table, index, out=found, mode="clip")
        index[:] = found
        return index

    def upload(
        self,
        inputs: StepInputs,
        shape: GraphShape | None,
    ) -> tuple[Tensor, Tensor, list[BatchView]]:
        """Copies the step to the device. Returns its T tokens and their positions, [T] int64 each,
        and views.

        A view is the step as one group sees it, padded to the shape. The two tensors are not
        padded.
        """
        num_rows, num_tokens, most_queries = shape or (
            len(inputs.rows),
            len(inputs.token_index),
            int(inputs.num_tokens.max()),
        )
        input_ids = self.input_ids.upload(len(inputs.token_index))
        positions = self.positions.upload(len(inputs.token_index))
        if shape is not None:
            self._pad(len(inputs.rows), len(inputs.token_index), shape)
        query_start = self.query_start.upload(num_rows + 1)
        views = []
        for group, buffer in zip(inputs.groups, self.groups, strict=True):
            is_cached = len(group.table) > 0
            width = group.table.shape[1] if shape is None else buffer.table.host.shape[1]
            view = BatchView(
                query_start=self.query_start.host[: num_rows + 1],
                seq_lens=buffer.seq_lens.host[:num_rows],
                starts=self.columns[1, :num_rows],
                query_start_device=query_start,
                seq_lens_device=buffer.seq_lens.upload(num_rows),
                block_table=buffer.table.upload(num_rows, width, changed=buffer.table_changed)
                if is_cached
                else None,
                slot_mapping=buffer.slots.upload(len(group.slots) if shape is None else num_tokens)
                if is_cached
                else None,
                max_query_len=most_queries,
                max_seq_len=int(group.seq_lens.max())
                if shape is None
                else self.limits.max_model_len,
                has_padding=shape is not None,
                is_fixed=shape is not None,
                spans=inputs.spans,
            )
            views.append(view)
            buffer.table_changed &= not is_cached
        if self.uploaded is not None:
            self.uploaded.record(torch.cuda.current_stream(self._device))
        return input_ids, positions, views

    def _pad(self, num_rows: int, num_tokens: int, shape: GraphShape) -> None:
        """Pads the step. Added rows have no keys, and their tokens have no slots. Each takes as
        many tokens as a row may, until all are used."""
        more = shape.max_query_len * np.arange(1, shape.num_rows - num_rows + 1)
        self.query_start.host[num_rows + 1 : shape.num_rows + 1] = np.minimum(
            num_tokens + more, shape.num_tokens
        )
        self.columns[1, num_rows : shape.num_rows] = 0
        for buffer in self.groups:
            buffer.seq_lens.host[num_rows : shape.num_rows] = 0
            buffer.slots.host[num_tokens : shape.num_tokens] = -1


_NO_TOKENS = np.zeros(0, np.int64)


class EncoderRows:
    """The encoder sequences that the runner holds, one per row, and the one that each batch row
    reads."""

    def __init__(self, num_rows: int) -> None:
        self.row_of: dict[int, int] = {}
        """Encoder rows by encoder id."""
        self.lengths = np.zeros(num_rows, np.int64)
        self._free = list(range(num_rows))[::-1]
        self._read_by = np.zeros(num_rows, np.int64)

    def add(self, encoder: NewEncoder) -> int:
        """Adds an encoder sequence, and returns its row. A free row exists, since a batch row that
        reads it is added too."""
        row = self.row_of[encoder.encoder_id] = self._free.pop()
        self.lengths[row] = encoder.num_tokens
        return row

    def drop(self, encoder_id: int) -> None:
        """Removes an encoder sequence. Unknown ones are accepted."""
        if (row := self.row_of.pop(encoder_id, None)) is not None:
            self._free.append(row)

    def bind(self, row: int, encoder_id: int) -> None:
        """Makes a batch row read an encoder sequence."""
        self._read_by[row] = self.row_of[encoder_id]

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Encoder rows that the batch rows read, and their lengths."""
        read = self._read_by[rows]
        return read, self.lengths[read]

    def batch(self, plan: StepPlan) -> EncoderBatch | None:
        """Flat batch of the encoder sequences that a plan computes."""
        computed = [encoder.encoder_id for encoder in plan.encoders if encoder.input is not None]
        if not computed:
            return None
        rows = np.array([self.row_of[encoder] for encoder in computed])
        lengths = self.lengths[rows]
        ends = lengths.cumsum()
        return EncoderBatch(
            positions=np.arange(ends[-1]) - np.repeat(ends - lengths, lengths),
            row_of_token=np.repeat(rows, lengths),
        )


class PersistentBatch:
    """Rows of fixed capacity. A sequence keeps its row while it lives."""

    def __init__(
        self,
        buffers: StepBuffers,
        specs: Sequence[KVCacheSpec],
        max_model_len: int,
        processors: ProcessorTable | None = None,
        apart: Sequence[bool] = (),
    ) -> None:
        """`buffers`: those of the KV groups, which have these `specs`, and then those of layers
        that cache nothing.

        `processors`: the plugins' logits processors, if sequences can use them. `apart`: groups
        that see no flat batch; empty: all do.
        """
        num_rows = len(buffers.query_start.host) - 1
        self.buffers = buffers
        self.block_sizes = [spec.block_size for spec in specs]
        self._is_apart = [*(apart or [False] * len(specs))]
        self._is_apart += [True] * (len(buffers.groups) - len(specs))
        self.row_of: dict[int, int] = {}
        """Batch rows by seq_id."""
        self.encoders = EncoderRows(num_rows)
        self._of_encoder = [spec.of_encoder for spec in specs]
        self.history = TokenHistory(num_rows, max_model_len)
        self.sampling = SamplingBatch(self.history, processors)
        self.num_prompt_logprobs = np.zeros(num_rows, np.int64)
        """Number of prompt tokens whose log probabilities are known, per row."""
        self._free_rows = list(range(num_rows))[::-1]
        self._block_tables = [
            np.zeros_like(group.table.host) for group in buffers.groups[: len(specs)]
        ]
        self._num_blocks = np.zeros((len(specs), num_rows), np.int64)
        self._gathered: list[tuple[int, bytes] | None] = [None] * len(specs)
        """Width and rows of the block table in the buffer, per KV group; None: the buffer is out of
        date."""

    def apply(self, plan: StepPlan) -> None:
        """Applies a plan's changes: sequences leave, join and grow."""
        for seq_id in plan.dropped:
            # A plan that was interrupted may name a sequence that never came here.
            if (row := self.row_of.pop(seq_id, None)) is not None:
                self._free_rows.append(row)
                self.sampling.clear(row)
            else:
                self.encoders.drop(seq_id)
        for encoder in plan.encoders:
            row = self.encoders.add(encoder)
            for group, blocks in enumerate(encoder.block_tables):
                if self._of_encoder[group]:
                    self._block_tables[group][row, : len(blocks)] = blocks
                    self._gathered[group] = None
        new = {seq.seq_id for seq in plan.new}
        for seq in plan.new:
            self._add(seq)
        for move in plan.moves:
            self._block_tables[move.group][self.row_of[move.seq_id], move.index] = move.block
            self._gathered[move.group] = None
        for scheduled in plan.scheduled:
            if scheduled.seq_id not in new:
                for group, blocks in enumerate(scheduled.new_blocks):
                    if blocks:
                        self._append_blocks(self.row_of[scheduled.seq_id], group, blocks)
            if scheduled.tokens:
                self.history.put(
                    self.row_of[scheduled.seq_id],
                    scheduled.start,
                    scheduled.tokens,
                    scheduled.num_drafts,
                )

    def inputs(self, plan: StepPlan) -> StepInputs:
        """Writes the flat batch of a plan to the buffers."""
        buffers = self.buffers
        num_rows = len(plan.scheduled)
        num_sampling = 0
        end = 0
        if buffers.uploaded is not None:
            buffers.uploaded.synchronize()
        rows, starts, num_tokens, lengths, sampling, num_drafts = buffers.columns[:, :num_rows]
        query_start = buffers.query_start.host[: num_rows + 1]
        for index, scheduled in enumerate(plan.scheduled):
            rows[index] = self.row_of[scheduled.seq_id]
            starts[index] = scheduled.start
            num_tokens[index] = scheduled.num_tokens
            query_start[index + 1] = end = end + scheduled.num_tokens
            if scheduled.samples:
                sampling[num_sampling] = index
                num_drafts[num_sampling] = scheduled.num_drafts
                num_sampling += 1
        token_index = buffers.positions.host[:end]
        row_of_token = rows
        if end == num_rows:
            # In a decode step, each row has one token.
            token_index[:] = starts
        else:
            row_of_token = rows.repeat(num_tokens)
            token_index[:] = np.arange(end)
            token_index += (starts - query_start[:-1]).repeat(num_tokens)
        input_ids = buffers.input_ids.host[:end]
        input_ids[:] = buffers.gather(self.history.token_ids, row_of_token, token_index)
        encoders = self.encoders.batch(plan) if plan.encoders else None
        return StepInputs(
            plan=plan,
            rows=rows,
            input_ids=input_ids,
            token_index=token_index,
            query_start=query_start,
            starts=starts,
            num_tokens=num_tokens,
            groups=self._groups(
                rows, np.add(starts, num_tokens, out=lengths), row_of_token, token_index, encoders
            ),
            sampling=sampling[:num_sampling],
            num_drafts=num_drafts[:num_sampling],
            histories=self.history,
            encoders=encoders,
        )

    def _groups(
        self,
        rows: np.ndarray,
        lengths: np.ndarray,
        row_of_token: np.ndarray,
        token_index: np.ndarray,
        encoders: EncoderBatch | None,
    ) -> list[GroupInputs]:
        own = rows, lengths, row_of_token, token_index, int(lengths.max())
        groups = []
        for index, buffer in enumerate(self.buffers.groups):
            rows, lengths, row_of_token, token_index, longest = own
            if index < len(self.block_sizes) and self._of_encoder[index]:
                rows, lengths = self.encoders.of(rows)
                row_of_token, token_index = (
                    (_NO_TOKENS, _NO_TOKENS)
                    if encoders is None
                    else (encoders.row_of_token, encoders.positions)
                )
                longest = int(lengths.max())
            seq_lens = buffer.seq_lens.host[: len(rows)]
            seq_lens[:] = lengths
            if self._is_apart[index]:
                groups.append(GroupInputs(seq_lens, buffer.slots.host[:0], buffer.table.host[:0]))
                continue
            table = self._block_tables[index]
            size = self.block_sizes[index]
            slots = buffer.slots.host[: len(token_index)]
            width = -(-longest // size)
            # slot = first slot of the token's block + offset in the block: block * size + (index -
            # index // size * size).
            np.floor_divide(token_index, size, out=slots)
            blocks = self.buffers.gather(table, row_of_token, slots)
            np.subtract(blocks, slots, out=slots)
            slots *= size
            slots += token_index
            if (gathered := (width, rows.tobytes())) != self._gathered[index]:
                self._gathered[index] = gathered
                buffer.table_changed = True
                step_table = buffer.table.mirror[: len(rows), :width]
                torch.index_select(
                    torch.from_numpy(table)[:, :width], 0, torch.from_numpy(rows), out=step_table
                )
            groups.append(GroupInputs(seq_lens, slots, buffer.table.host[: len(rows), :width]))
        return groups

    def slots(
        self, group: int, rows: np.ndarray, counts: np.ndarray, index: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes block tables and slots of some rows [N] anew: the table [N, most blocks] in a KV
        group, and the slots [T] of their tokens. Row n has `counts[n]` tokens. `index` [T] is each
        token's index in its sequence.

        Raises ValueError for a token without a slot.
        """
        size = self.block_sizes[group]
        of_token = np.repeat(rows, counts)
        blocks = index // size
        if (missing := blocks >= self._num_blocks[group, of_token]).any():
            raise ValueError(
                f"token {int(index[missing][0])} of a sequence has no slot in KV group {group}: a "
                "part's own layers have as many beyond the step's tokens as its `lookahead`"
            )
        table = self._block_tables[group][rows, : int(blocks.max()) + 1]
        return table, self._block_tables[group][of_token, blocks].astype(np.int64) * size + (
            index % size
        )

    def append_tokens(
        self, rows: np.ndarray, token_ids: list[int], accepted: np.ndarray | int = 0
    ) -> None:
        """Appends a sampled token to each of `rows`, as input of a later step. `accepted`: number
        of drafts before it, which are in the history already, and now count."""
        self.history.append(rows, token_ids, accepted)
        self.sampling.position[rows] += 1 + accepted

    def _add(self, seq: NewSequence) -> None:
        row = self._free_rows.pop()
        self.row_of[seq.seq_id] = row
        self.history.set(row, seq.token_ids, seq.num_prompt_tokens)
        self._num_blocks[:, row] = 0
        for group, blocks in enumerate(seq.block_tables):
            self._append_blocks(row, group, blocks)
        if seq.encoder_id is not None:
            self.encoders.bind(row, seq.encoder_id)
        self.num_prompt_logprobs[row] = seq.num_prompt_logprobs
        self.sampling.set(row, seq)

    def _append_blocks(self, row: int, group: int, blocks: list[int]) -> None:
        start = self._num_blocks[group, row]
        self._gathered[group] = None
        self._block_tables[group][row, start : start + len(blocks)] = blocks
        self._num_blocks[group, row] += len(blocks)
