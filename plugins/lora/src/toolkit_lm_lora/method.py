"""Linear methods that add an adapter's B A x to a layer's result, for the rows of the adapter."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from toolkit_lm.model import (
    NO_EPILOGUE,
    Epilogue,
    LinearMethod,
    LinearSpec,
    LowRank,
    Rows,
    Shard,
    WrappingMethod,
)
from torch import Tensor, nn
from torch.nn import functional as F

_BUILDING = Lock()
"""Kernels hand out the memory of weights to one thread at a time."""


class Product:
    """x W^T by the model's kernels: [rows, inputs] -> [rows, outputs]. With kernels that are batch
    invariant, a row's bits do not depend on the others."""

    def __init__(self, kernels: Any, weight: Tensor) -> None:
        """`weight` [outputs, inputs] is copied."""
        outputs, inputs = weight.shape
        spec = LinearSpec(
            kind="linear",
            prefix="lora",
            inputs=Shard.whole(inputs),
            outputs=(Shard.whole(outputs),),
            dtype=weight.dtype,
        )
        self.nbytes = weight.nbytes
        holder: Any = nn.Module()
        with _BUILDING, torch.device(weight.device):
            self._method: LinearMethod = kernels.linear_method(spec)
            self._method.create(holder, spec)
            holder.weight.data.copy_(weight)
            self._method.process(holder)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._method.multiply(x, bias)


class Change(NamedTuple):
    """Changes by one adapter in one layer: this rank's share. Each field may be None."""

    pair: Any = None
    """A and B, which the kernels add inside their products, by LowRank of the model's kernels; then
    there is nothing else."""
    low: Product | None = None
    """A: inputs -> rank. Of several adapted parts of a fused layer, one after the other."""
    table: Tensor | None = None
    """A of an embedding: [vocabulary, rank]."""
    high: Product | None = None
    """B, times the adapter's scaling: rank -> outputs of `where`."""
    where: slice = slice(0)
    """The outputs that `high` changes."""
    shift: Tensor | None = None
    """[outputs], added to the result."""
    magnitude: Tensor | None = None
    """[outputs], of DoRA: factor of the product without the bias."""
    weight: Product | None = None
    """inputs -> outputs, in the place of the layer's own."""
    embedding: Tensor | None = None
    """[vocabulary, size], in the place of an embedding's own."""
    tokens: Tensor | None = None
    """[N] indices of outputs of an embedding or a head, whose weights are `rows` instead."""
    rows: Tensor | None = None
    """Of an embedding: [N, size]."""
    head_rows: Product | None = None
    """Of a head: inputs -> N."""

    @property
    def num_bytes(self) -> int:
        own = 0 if self.pair is None else self.pair.nbytes
        return own + sum(part.nbytes for part in self if isinstance(part, Tensor | Product))


class Group(NamedTuple):
    """The rows of a call that an adapter changes."""

    changes: Mapping[str, Change]
    """By layer."""
    scale: float
    rows: Tensor | None
    """Indices of the rows (int64); None: all."""


class Grouping(Protocol):
    """Tells which rows have which adapter."""

    low_rank: LowRank | None
    """What makes pairs."""

    def adds_to(self, layer: str) -> bool:
        """Whether the layer's own method adds pairs to some rows of the step."""

    def groups_of(self, rows: Rows | Tensor, count: int, layer: str) -> list[Group]:
        """The groups that change a layer, of a call with `count` rows. Without empty ones."""


class LoraMethod(WrappingMethod):
    """Rows without an adapter that changes the layer are computed as if there were none."""

    def __init__(self, inner: LinearMethod, *, grouping: Grouping, layer: str) -> None:
        super().__init__(inner)
        self._grouping = grouping
        self._layer = layer

    def apply(
        self,
        x: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue = NO_EPILOGUE,
        *,
        rows: Rows | Tensor = Rows.FLAT,
    ) -> Tensor:
        groups = self._grouping.groups_of(rows, len(x), self._layer)
        if not groups:
            return self.inner.apply(x, bias, epilogue, rows=rows)
        if epilogue is NO_EPILOGUE:
            return self._changed(x, self.inner.apply(x, bias, rows=rows), bias, groups)
        if any(group.rows is None for group in groups):
            return epilogue.finish(
                self._changed(x, self.inner.apply(x, bias, rows=rows), bias, groups)
            )
        if self._grouping.adds_to(self._layer):
            # The method adds to the other rows, which are then those of the whole step.
            out = self.inner.apply(x, bias, epilogue, rows=rows)
            found = torch.zeros(len(x), dtype=torch.bool, device=x.device)
            for group in groups:
                found[group.rows] = True
            own = found.nonzero()[:, 0]
            out[own] = self._finished(x, bias, epilogue, groups, own)
            return out
        # The method may fuse the epilogue, and round otherwise then.
        others = torch.ones(len(x), dtype=torch.bool, device=x.device)
        for group in groups:
            others[group.rows] = False
        own, others = (~others).nonzero()[:, 0], others.nonzero()[:, 0]
        finished = self._finished(x, bias, epilogue, groups, own)
        out = finished.new_empty(len(x), finished.shape[1])
        out[own] = finished
        if len(others):
            out[others] = self.inner.apply(x[others], bias, _at(epilogue, others))
        return out

    def _finished(
        self,
        x: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue,
        groups: list[Group],
        own: Tensor,
    ) -> Tensor:
        """The result for the rows `own`, which are those of `groups`."""
        place = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        place[own] = torch.arange(len(own), device=x.device)
        inner = [
            group._replace(rows=place[group.rows]) for group in groups if group.rows is not None
        ]
        some = x[own]
        done = self._changed(some, self.inner.multiply(some, bias), bias, inner)
        return _at(epilogue, own).finish(done)

    def _changed(self, x: Tensor, out: Tensor, bias: Tensor | None, groups: list[Group]) -> Tensor:
        for changes, scale, mine in groups:
            change = changes[self._layer]
            some, found = (x, out) if mine is None else (x[mine], out[mine])
            if change.pair is None:
                found = _change(some, found, bias, change, scale)
            else:
                # Beside another adapter of its rows that is no pair.
                assert self._grouping.low_rank is not None
                found = found + self._grouping.low_rank.product(change.pair, some) * scale
            if mine is None:
                out = found
            else:
                out[mine] = found
        return out


class LoraEmbedding(LoraMethod):
    """The same for lookups: an embedding's rows are the step's tokens."""

    def embed(self, ids: Tensor) -> Tensor:
        out = self.inner.embed(ids)
        for changes, scale, mine in self._grouping.groups_of(Rows.FLAT, len(ids), self._layer):
            change = changes[self._layer]
            own = ids if mine is None else ids[mine]
            found = out if mine is None else out[mine]
            if change.embedding is not None:
                found = F.embedding(own, change.embedding)
            if change.table is not None:
                assert change.high is not None
                found = found + change.high(F.embedding(own, change.table) * scale)
            if change.tokens is not None and change.rows is not None:
                at = torch.searchsorted(change.tokens, own).clamp_(max=len(change.tokens) - 1)
                hit = (change.tokens[at] == own).unsqueeze(-1)
                found = torch.where(hit, change.rows[at], found)
            if mine is None:
                out = found
            else:
                out[mine] = found
        return out


def _at(epilogue: Epilogue, rows: Tensor) -> Epilogue:
    """The epilogue of some rows."""
    residual = epilogue.residual
    return epilogue if residual is None else epilogue._replace(residual=residual[rows])


def _change(x: Tensor, out: Tensor, bias: Tensor | None, change: Change, scale: float) -> Tensor:
    """The result `out` [rows, outputs] of a layer, changed for rows of one adapter."""
    if change.weight is not None:
        out = change.weight(x, bias)
    elif change.magnitude is not None:
        out = out * change.magnitude if bias is None else (out - bias) * change.magnitude + bias
    if change.low is not None:
        assert change.high is not None
        low = change.low(x)
        out[:, change.where] += change.high(low if scale == 1 else low * scale)
    if change.shift is not None:
        out += change.shift if scale == 1 else change.shift * scale
    if change.head_rows is not None:
        out[:, change.tokens] = change.head_rows(x)
    return out
