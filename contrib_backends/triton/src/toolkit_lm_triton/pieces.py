"""Plan of one step for a layer: queries that a program of the kernels computes, and the keys that
they can see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from toolkit_lm.attention import AttentionType, BatchView, LayerParams
from torch import Tensor

COLUMNS = 8
"""Columns of a piece in the kernels' table: row, token, position, count, first key, end of keys,
origin, place.

`token` is the index of its first query in the step, `position` that query's in its row. `origin` is
the index of its row's first token. `place` counts queries from the start of the launch.
"""
SPLIT = 256
"""Fewest keys of a program, where few queries have many."""
_MOST_SPLITS = 32
"""Most programs that share the keys of a row: what they leave for `merge` takes memory."""
_LEAST_ROWS = 16
"""Rows of the smallest matrix that tensor cores multiply."""
_ROWS = 64


class Tile(NamedTuple):
    """Queries of a program. Its rows are `queries` times `group`.

    `group`: the query heads of a KV head, filled up to a power of 2.
    """

    queries: int
    group: int

    @property
    def rows(self) -> int:
        return self.queries * self.group

    @classmethod
    def of(cls, group: int, least: int) -> Tile:
        filled = power_of_2(group)
        return cls(max(least // filled, 1), filled)

    @classmethod
    def of_decodes(cls, group: int) -> Tile:
        """Tile for rows with few queries."""
        return cls.of(group, _LEAST_ROWS)


class PlanKey(NamedTuple):
    """The properties of a layer that a plan depends on."""

    type: AttentionType | str
    window: int | None
    group: int
    spans: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """The pieces that one launch of the kernels computes."""

    tile: Tile
    table: np.ndarray | None
    """[P, COLUMNS] int32. None: the host does not know it, in a CUDA graph."""
    device_table: Tensor
    """[P, COLUMNS] int32: the table on the device."""
    splits: int
    """Most programs that share the keys of a piece. 1: no keys are shared out."""

    def positions(self, first: int, end: int) -> np.ndarray:
        """[queries] int64: of the queries of pieces first : end, one piece after the other."""
        assert self.table is not None
        table = self.table[first:end].astype(np.int64)
        ends = table[:, 3].cumsum()
        positions: np.ndarray = np.arange(table[:, 3].sum()) + np.repeat(
            table[:, 2] - ends + table[:, 3], table[:, 3]
        )
        return positions

    def chunks(self, most: int) -> Iterator[tuple[int, int]]:
        """(first, end) of pieces that have at most so many queries together, or are one."""
        assert self.table is not None
        first = 0
        queries = 0
        for index, count in enumerate(self.table[:, 3].tolist()):
            if index > first and queries + count > most:
                yield first, index
                first = index
                queries = 0
            queries += count
        yield first, len(self.table)


@dataclass(frozen=True, slots=True)
class Metadata:
    """One step. Plans are made by the first layer that needs them: the batch knows neither windows
    nor head counts.

    In a CUDA graph they are there before: `keep`.
    """

    batch: BatchView
    split: int = SPLIT
    """Keys of a program, as `split_for` has it."""
    _plans: dict[PlanKey, list[Launch]] = field(default_factory=dict)
    _span_ends: list[Tensor] = field(default_factory=list)

    def plan(self, layer: LayerParams) -> list[Launch]:
        spans = layer.spans and self.batch.spans is not None
        key = PlanKey(
            layer.attention_type, layer.window, layer.num_heads // layer.num_kv_heads, spans
        )
        if key not in self._plans:
            assert not self.batch.is_fixed, "a plan is made in `build`"
            self._plans[key] = make_plan(self.batch, key, self.split)
        return self._plans[key]

    def keep(self, key: PlanKey, part: Launch) -> None:
        """Gives the plan of a step in a CUDA graph."""
        self._plans[key] = [part]

    def span_ends(self) -> Tensor:
        """[T] int32: the end of each token's span, as an index in its sequence."""
        if not self._span_ends:
            assert self.batch.spans is not None
            ends = np.ascontiguousarray(self.batch.spans[:, 1], np.int32)
            self._span_ends.append(
                torch.from_numpy(ends).to(self.batch.seq_lens_device.device, non_blocking=True)
            )
        return self._span_ends[0]


def split_for(max_model_len: int) -> int:
    """Keys of a program in an engine. They are the same for all rows: what a row gives does not
    depend on the rows beside it."""
    return max(SPLIT, power_of_2(-(-max_model_len // _MOST_SPLITS)))


def decode_table(num_rows: int, device: torch.device) -> Tensor:
    """[num_rows, COLUMNS] int32 of rows of one query each, for `fill_decode_table`."""
    table = torch.zeros(num_rows, COLUMNS, dtype=torch.int32, device=device)
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    for column in (0, 1, 6, 7):
        table[:, column] = rows
    table[:, 3] = 1
    return table


def fill_decode_table(table: Tensor, seq_lens: Tensor, window: int | None) -> None:
    """The pieces of rows with so many keys, [num_rows] int32, of which the last is the query's. The
    host waits for nothing."""
    torch.sub(seq_lens, 1, out=table[:, 2])
    table[:, 5] = seq_lens
    if window is not None:
        torch.clamp(seq_lens - window, min=0, out=table[:, 4])


def make_plan(batch: BatchView, key: PlanKey, split: int = SPLIT) -> list[Launch]:
    """Rows of few queries (decode, drafts), whose keys are shared out; and the other ones (prefill,
    chunks, encoders)."""
    counts = np.diff(batch.query_start)
    short = Tile.of_decodes(key.group)
    is_short = counts <= short.queries
    parts = []
    for tile, rows in (
        (short, np.flatnonzero(is_short & (counts > 0))),
        (Tile.of(key.group, _ROWS), np.flatnonzero(~is_short)),
    ):
        if len(rows):
            table = _pieces(batch, key, rows, tile.queries)
            most = int((table[:, 5] - table[:, 4]).max())
            splits = max(-(-most // split), 1) if tile is short else 1
            parts.append(
                Launch(
                    tile,
                    table,
                    torch.from_numpy(table).to(batch.seq_lens_device.device, non_blocking=True),
                    splits,
                )
            )
    return parts


def _pieces(batch: BatchView, key: PlanKey, rows: np.ndarray, queries: int) -> np.ndarray:
    """[P, COLUMNS] int32, of these rows, with so many queries each."""
    counts = np.diff(batch.query_start)[rows].astype(np.int64)
    lengths = batch.seq_lens[rows].astype(np.int64)
    numbers = -(-counts // queries)
    owner = np.repeat(np.arange(len(rows)), numbers)
    first = (np.arange(numbers.sum()) - np.repeat(numbers.cumsum() - numbers, numbers)) * queries
    starts = batch.query_start[rows][owner].astype(np.int64)
    length = lengths[owner]
    count = np.minimum(queries, counts[owner] - first)
    position = first + (length - counts[owner] if key.type is AttentionType.DECODER else 0)
    begin = np.zeros_like(first)
    end = length
    if key.type is AttentionType.DECODER:
        end = np.minimum(length, position + count)
        if key.spans:
            assert batch.spans is not None
            ends = batch.spans[:, 1].astype(np.int64)
            end = np.minimum(
                length,
                np.array(
                    [
                        ends[at : at + number].max()
                        for at, number in zip(starts + first, count, strict=True)
                    ]
                ),
            )
    elif key.window is not None:
        end = np.minimum(length, position + count - 1 + key.window)
    if key.window is not None:
        # The blocks before the window may be gone.
        begin = np.minimum(np.maximum(position + 1 - key.window, 0), end)
    columns = (
        rows[owner],
        starts + first,
        position,
        count,
        begin,
        end,
        starts,
        count.cumsum() - count,
    )
    return np.stack(columns, axis=1).astype(np.int32)


def power_of_2(number: int) -> int:
    """The least one that is not below it."""
    return 1 << (number - 1).bit_length()
