"""Pooling methods: how the hidden states of a prompt's tokens become one vector, over one or
several chunks of the prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from toolkit_lm_poolers.details import Splade
from toolkit_lm_poolers.rows import PoolingRow

BLOCK = 2048
"""Tokens that are converted to float32 at a time."""
_LOGITS_OF = 128
"""Tokens whose logits over a vocabulary are held at a time."""


class Segments:
    """The rows of a step as index tensors, made once for all methods. R rows, T tokens of the flat
    batch."""

    def __init__(self, rows: Sequence[PoolingRow], num_tokens: int, device: torch.device) -> None:
        self.rows = rows
        self.num_tokens = num_tokens
        self.device = device
        self.finished = [index for index, row in enumerate(rows) if row.finished]
        self._row_of_token: Tensor | None = None

    def tensor(self, values: Sequence[int] | np.ndarray) -> Tensor:
        """Integers as int64 on the device."""
        return torch.from_numpy(np.asarray(values, np.int64)).to(self.device, non_blocking=True)

    @property
    def row_of_token(self) -> Tensor:
        """[T] int64: in which row a token is pooled; R for tokens that are not."""
        if self._row_of_token is None:
            owners = np.full(self.num_tokens, len(self.rows), np.int64)
            for index, row in enumerate(self.rows):
                owners[row.pooled_tokens] = index
            self._row_of_token = self.tensor(owners)
        return self._row_of_token

    def blocks(self) -> Iterator[slice]:
        """Cuts [0, T) into parts whose float32 copies stay in the cache."""
        for start in range(0, self.num_tokens, BLOCK):
            yield slice(start, start + BLOCK)

    def only_finished(self, values: Tensor) -> Tensor:
        """The entries [F, ...] of finished rows, of a tensor with one for each row [R, ...]."""
        return (
            values if len(self.finished) == len(self.rows) else values[self.tensor(self.finished)]
        )


class PoolingMethod(ABC):
    """Makes one vector of a prompt's tokens. What it must remember between the chunks of a prompt
    lies in `row.state[self.name]`."""

    name: ClassVar[str]
    reads_prefix_cache: ClassVar[bool] = False
    """The first tokens' hidden states are not needed."""
    width: int = 1
    """Size of the method's vector as a multiple of a token vector's."""

    @abstractmethod
    def pool(self, hidden_states: Tensor, segments: Segments) -> Tensor:
        """Hidden states [T, H] of the flat batch -> [F, H] float32: a vector for each row that ends
        in this step, in order."""

    def _carry(self, values: Tensor, segments: Segments) -> Tensor:
        """Merges what this step gives of each row [R, H] with what former chunks gave; keeps that
        of rows that go on."""
        for index, row in enumerate(segments.rows):
            if row.start > 0:
                assert self.name in row.state, (
                    f"{self.name} pooling lacks the beginning of a prompt"
                )
                values[index] = self._merge(row, row.state.pop(self.name), values[index])
            if not row.finished:
                row.state[self.name] = values[index].clone()
        return segments.only_finished(values)

    def _merge(self, row: PoolingRow, before: Tensor, now: Tensor) -> Tensor:
        """Combined result of this chunk and those before it. [H] each."""
        raise NotImplementedError


class Cls(PoolingMethod):
    """The vector of the first token that is pooled."""

    name = "CLS"

    def pool(self, hidden_states: Tensor, segments: Segments) -> Tensor:
        # Before that token has come, any other stands in for it.
        places = [min(row.pooled_tokens.start, row.tokens.stop - 1) for row in segments.rows]
        return self._carry(hidden_states[segments.tensor(places)].float(), segments)

    def _merge(self, row: PoolingRow, before: Tensor, now: Tensor) -> Tensor:
        return before if row.start > row.pooling_start else now


class Last(PoolingMethod):
    """The vector of the last token: the only one that a causal model lets see all others."""

    name = "LAST"
    reads_prefix_cache = True

    def pool(self, hidden_states: Tensor, segments: Segments) -> Tensor:
        return hidden_states[
            segments.tensor([segments.rows[index].tokens.stop - 1 for index in segments.finished])
        ].float()


class _Sum(PoolingMethod):
    """A weighted sum over the tokens, in float32, times a factor that depends on their number."""

    def pool(self, hidden_states: Tensor, segments: Segments) -> Tensor:
        sums = torch.zeros(
            len(segments.rows) + 1,
            hidden_states.shape[1],
            dtype=torch.float32,
            device=segments.device,
        )
        # A chunk's sum begins with that of the chunks before: one order of additions, however the
        # prompt is cut.
        for index, row in enumerate(segments.rows):
            if self.name in row.state:
                sums[index] = row.state[self.name]
        weights = self._weights(segments)
        for block in segments.blocks():
            vectors = hidden_states[block].float()
            sums.index_add_(
                0,
                segments.row_of_token[block],
                vectors if weights is None else vectors * weights[block],
            )
        totals = self._carry(sums[:-1], segments)
        factors = np.array(
            [self._factor(segments.rows[index]) for index in segments.finished], np.float32
        )
        return totals * torch.from_numpy(factors).to(segments.device, non_blocking=True).unsqueeze(
            1
        )

    def _merge(self, row: PoolingRow, before: Tensor, now: Tensor) -> Tensor:
        return now

    def _weights(self, segments: Segments) -> Tensor | None:
        """[T, 1] float32; None: all are 1."""
        return None

    @abstractmethod
    def _factor(self, row: PoolingRow) -> float: ...


class Mean(_Sum):
    """The mean over all tokens."""

    name = "MEAN"

    def _factor(self, row: PoolingRow) -> float:
        return 1 / (row.num_prompt_tokens - row.pooling_start)


class MeanSqrtLen(_Sum):
    """The sum over all tokens, divided by the square root of their number."""

    name = "MEAN_SQRT_LEN"

    def _factor(self, row: PoolingRow) -> float:
        return float((row.num_prompt_tokens - row.pooling_start) ** -0.5)


class WeightedMean(_Sum):
    """The mean over all tokens, the n-th with weight n (SGPT, Muennighoff 2022). Tokens that are
    left out are counted all the same."""

    name = "WEIGHTED_MEAN"

    def _weights(self, segments: Segments) -> Tensor:
        weights = np.zeros(segments.num_tokens, np.float32)
        for row in segments.rows:
            weights[row.tokens] = np.arange(row.start + 1, row.start + 1 + len(row.token_ids))
        return torch.from_numpy(weights).to(segments.device, non_blocking=True).unsqueeze(1)

    def _factor(self, row: PoolingRow) -> float:
        tokens = row.num_prompt_tokens
        left_out = row.pooling_start
        return 2 / (tokens * (tokens + 1) - left_out * (left_out + 1))


class Max(PoolingMethod):
    """The maximum over all tokens, in each dimension."""

    name = "MAX"

    def pool(self, hidden_states: Tensor, segments: Segments) -> Tensor:
        size = hidden_states.shape[1]
        most = torch.full(
            (len(segments.rows) + 1, size),
            float("-inf"),
            dtype=torch.float32,
            device=segments.device,
        )
        owners = segments.row_of_token.unsqueeze(1).expand(-1, size)
        for block in segments.blocks():
            most.scatter_reduce_(0, owners[block], hidden_states[block].float(), "amax")
        return self._carry(most[:-1], segments)

    def _merge(self, row: PoolingRow, before: Tensor, now: Tensor) -> Tensor:
        return torch.maximum(before, now)


class SpladeWeights(PoolingMethod):
    """Weights of the vocabulary's tokens, of the logits that `head` [N, H] -> [N, V] gives. It is
    for models that compute a prompt whole."""

    name = "SPLADE"

    def __init__(self, head: Callable[[Tensor], Tensor], splade: Splade) -> None:
        self.head = head
        self.splade = splade

    def pool(self, hidden_states: Tensor, segments: Segments) -> Tensor:
        """[F, V] float32."""
        return torch.stack(
            [
                self._weights(hidden_states[segments.rows[index].pooled_tokens])
                for index in segments.finished
            ]
        )

    def _weights(self, states: Tensor) -> Tensor:
        """Of one prompt's tokens [T, H], [V]."""
        total: Tensor | None = None
        for part in torch.split(states, _LOGITS_OF):
            weights = self.head(part).float().relu_().log1p_()
            if self.splade.log_twice:
                weights = weights.log1p_()
            if self.splade.strategy == "max":
                now = weights.amax(0)
                total = now if total is None else torch.maximum(total, now)
            else:
                now = weights.sum(0)
                total = now if total is None else total + now
        assert total is not None, "a prompt without tokens was refused before"
        return total


class Concatenated(PoolingMethod):
    """The vectors of several methods side by side."""

    name = "+"

    def __init__(self, methods: Sequence[PoolingMethod]) -> None:
        self.methods = methods
        self.width = sum(method.width for method in methods)

    def pool(self, hidden_states: Tensor, segments: Segments) -> Tensor:
        pooled = {
            method.name: method.pool(hidden_states, segments)
            for method in dict.fromkeys(self.methods)
        }
        return torch.cat([pooled[method.name] for method in self.methods], dim=-1)


METHODS: Mapping[str, PoolingMethod] = MappingProxyType(
    {
        method.name: method
        for method in (Cls(), Last(), Mean(), MeanSqrtLen(), WeightedMean(), Max())
    }
)
"""One vector for a prompt. ALL and STEP, which give one for a token, are poolers of their own."""
