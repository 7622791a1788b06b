"""Poolers: one vector for a prompt, one for each token, one for each step of a solution, and
several tasks in one batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from toolkit_lm.config import PoolingTask
from toolkit_lm.pooling_params import PoolingParams
from torch import Tensor, nn

from toolkit_lm_poolers.heads import ClassifierHead, Head
from toolkit_lm_poolers.limits import check_params
from toolkit_lm_poolers.methods import PoolingMethod, Segments
from toolkit_lm_poolers.rows import PoolingMetadata, PoolingRow, RowPooler


class _HeadPooler(RowPooler):
    """A pooler of some tasks, whose vectors one head finishes."""

    def __init__(self, tasks: Iterable[PoolingTask], head: Head) -> None:
        super().__init__()
        self.tasks = frozenset(tasks)
        self.head = head

    def supported_tasks(self) -> frozenset[PoolingTask]:
        return self.tasks

    def chunkable(self, task: PoolingTask) -> bool:
        return True

    def check(self, params: PoolingParams) -> None:
        super().check(params)
        check_params(params, self.head.size)

    def output_size(self, task: PoolingTask) -> int:
        return self.head.size


class SimplePooler(_HeadPooler):
    """One vector for a prompt: a pooling method, then a head.

    `token_heads`, if any, are applied to each token's vector before: [T, H] -> [T, H'] float32.
    """

    def __init__(
        self,
        tasks: Iterable[PoolingTask],
        method: PoolingMethod,
        head: Head,
        token_heads: nn.Module | None = None,
    ) -> None:
        super().__init__(tasks, head)
        self.method = method
        self.token_heads = token_heads

    def reads_prefix_cache(self, task: PoolingTask) -> bool:
        return self.method.reads_prefix_cache

    def forward(self, hidden_states: Tensor, meta: PoolingMetadata) -> list[Tensor | None]:
        if self.token_heads is not None:
            hidden_states = self.token_heads(hidden_states.float())
        segments = Segments(meta.rows, hidden_states.shape[0], hidden_states.device)
        vectors = self.method.pool(hidden_states, segments)
        if not segments.finished:
            return [None] * len(meta.rows)
        finished = self._finish(
            self.head(vectors), [meta.rows[index].params for index in segments.finished]
        )
        if len(finished) == len(meta.rows):
            return list(finished)
        results: list[Tensor | None] = [None] * len(meta.rows)
        for index, result in zip(segments.finished, finished, strict=True):
            results[index] = result
        return results

    def _finish(self, values: Tensor, params: Sequence[PoolingParams]) -> Sequence[Tensor]:
        """Finishes the rows of `values` together that ask for the same."""
        groups: dict[object, list[int]] = {}
        for index, request_params in enumerate(params):
            groups.setdefault(self.head.postprocess_key(request_params), []).append(index)
        if len(groups) == 1:
            return self.head.finish(values, params[0]).unbind()
        results = list(values.unbind())
        for members in groups.values():
            for index, result in zip(
                members, self.head.finish(values[members], params[members[0]]).unbind(), strict=True
            ):
                results[index] = result
        return results


class ClassifierPooler(SimplePooler):
    """Classes or a score of a prompt: a pooling method, a classifier, an activation. It scores
    where there is one label."""

    def __init__(self, method: PoolingMethod, head: ClassifierHead) -> None:
        super().__init__({"classify", "score"} if head.size == 1 else {"classify"}, method, head)


class AllPooler(_HeadPooler):
    """A vector for each token. Chunks are finished one by one, and joined at the end."""

    def reads_prefix_cache(self, task: PoolingTask) -> bool:
        return False

    def forward(self, hidden_states: Tensor, meta: PoolingMetadata) -> list[Tensor | None]:
        selected = [self._select(row) for row in meta.rows]
        tokens = np.concatenate(selected) if selected else np.empty(0, np.int64)
        if len(tokens) != hidden_states.shape[0]:
            hidden_states = hidden_states[
                torch.from_numpy(tokens).to(hidden_states.device, non_blocking=True)
            ]
        values = self.head(hidden_states.float())
        keys = {self.head.postprocess_key(row.params) for row in meta.rows}
        if len(keys) == 1:
            values = self.head.finish(values, meta.rows[0].params)
        pieces = values.split([len(selected) for selected in selected])
        if len(keys) > 1:
            pieces = [
                self.head.finish(piece, row.params)
                for piece, row in zip(pieces, meta.rows, strict=True)
            ]
        return [self._join(row, piece) for row, piece in zip(meta.rows, pieces, strict=True)]

    def _select(self, row: PoolingRow) -> np.ndarray:
        """Indices into the flat batch of the tokens whose vectors are wanted, int64."""
        return np.arange(row.tokens.start, row.tokens.stop)

    def _join(self, row: PoolingRow, piece: Tensor) -> Tensor | None:
        if row.start == 0 and row.finished:
            return piece
        assert row.start == 0 or "pieces" in row.state, (
            "pooling of all tokens lacks the beginning of a prompt"
        )
        pieces: list[Tensor] = row.state.setdefault("pieces", [])
        pieces.append(piece.clone())
        return torch.cat(row.state.pop("pieces")) if row.finished else None


class StepPooler(AllPooler):
    """Classes of tokens, or scores of the steps of a solution (process reward models): of the
    tokens that end a step.

    `step_tag_id` is the token that ends a step; None: each token counts. A request may name another
    one.
    """

    def __init__(self, head: ClassifierHead, step_tag_id: int | None = None) -> None:
        super().__init__({"token_classify"}, head)
        self.step_tag_id = step_tag_id

    def _select(self, row: PoolingRow) -> np.ndarray:
        tag = self.step_tag_id if row.params.step_tag_id is None else row.params.step_tag_id
        tokens = super()._select(row)
        return tokens if tag is None else tokens[row.token_ids == tag]


class LexicalPooler(StepPooler):
    """A weight of each token, for matches by token: [tokens, 1], and 0 for `left_out`."""

    def __init__(self, head: ClassifierHead, left_out: Iterable[int]) -> None:
        super().__init__(head)
        self.left_out = np.array(sorted(left_out), np.int64)

    def _join(self, row: PoolingRow, piece: Tensor) -> Tensor | None:
        ids = row.token_ids[self._select(row) - row.tokens.start]
        counts = torch.from_numpy(~np.isin(ids, self.left_out))
        return super()._join(row, piece * counts.to(piece.device, non_blocking=True)[:, None])


class DispatchPooler(RowPooler):
    """Gives each row of a mixed batch to the pooler of its task. No two poolers take the same
    task."""

    def __init__(self, poolers: Sequence[RowPooler]) -> None:
        super().__init__()
        self.poolers = nn.ModuleList(poolers)
        self._by_task: dict[PoolingTask, RowPooler] = {}
        for pooler in poolers:
            for task in pooler.supported_tasks():
                assert task not in self._by_task, f"two poolers take the task {task}"
                self._by_task[task] = pooler

    def supported_tasks(self) -> frozenset[PoolingTask]:
        return frozenset(self._by_task)

    def reads_prefix_cache(self, task: PoolingTask) -> bool:
        return self._by_task[task].reads_prefix_cache(task)

    def chunkable(self, task: PoolingTask) -> bool:
        return self._by_task[task].chunkable(task)

    def check(self, params: PoolingParams) -> None:
        super().check(params)
        self._by_task[params.task].check(params)

    def output_size(self, task: PoolingTask) -> int | None:
        return self._by_task[task].output_size(task)

    def forward(self, hidden_states: Tensor, meta: PoolingMetadata) -> list[Tensor | None]:
        groups: dict[RowPooler, list[int]] = {}
        for index, row in enumerate(meta.rows):
            assert row.params.task in self._by_task, (
                f"the task {row.params.task} was not refused before"
            )
            groups.setdefault(self._by_task[row.params.task], []).append(index)
        results: list[Tensor | None] = [None] * len(meta.rows)
        for pooler, members in groups.items():
            part = PoolingMetadata([meta.rows[index] for index in members])
            for index, result in zip(members, pooler(hidden_states, part), strict=True):
                results[index] = result
        return results
