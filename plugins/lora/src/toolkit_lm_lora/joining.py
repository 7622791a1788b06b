"""Joins the changes of the parts of a layer: q, k and v of a fused projection become one A and one
B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import LinearBase, LinearMethod, LowRank, Rows, Shard
from torch import Tensor

from toolkit_lm_lora.method import Change, Product


class Dora(NamedTuple):
    """DoRA of a layer, before ranks have added up the norms of their shares."""

    magnitude: Tensor
    """[outputs]; NaN: the output is not adapted."""
    squares: Tensor
    """[outputs]: sum of squares of this rank's share of each row of W + B A."""
    high: Tensor
    """B of `Change.where`."""


@dataclass
class Part:
    """Changes of one output part of a layer, or of the whole layer: this rank's share."""

    low: Tensor | None = None
    high: Tensor | None = None
    shift: Tensor | None = None
    replaces_bias: bool = False
    """`shift` is the new bias itself: for merging, where the old one is not at hand."""
    magnitude: Tensor | None = None
    weight: Tensor | None = None


class Joining:
    """The changes of one layer."""

    def __init__(
        self,
        layer: LinearBase,
        parts: Mapping[int | None, Part],
        kernels: Any,
        tokens: tuple[Tensor, Tensor] | None,
        *,
        method: LinearMethod | None = None,
        low_rank: LowRank | None = None,
    ) -> None:
        """`tokens`: trained tokens of the whole vocabulary, and their rows. `method`: the layer's
        own, to whose products `low_rank` may add."""
        self._method = method
        self._low_rank = low_rank
        self._layer = layer
        self._spec = layer.spec
        self._parts = parts
        self._kernels = kernels
        self._tokens = tokens
        self._device = next(layer.parameters(), torch.empty(0)).device
        self._spans = {part: span(layer, part) for part in parts}
        self._high = torch.zeros(0)
        self.has_magnitudes = any(own.magnitude is not None for own in parts.values())

    def change(self) -> Change:
        spec = self._spec
        is_embedding = spec.kind == "embedding"
        if (pair := self._kernels_pair()) is not None:
            return Change(pair=pair)
        made = self._pair()
        shift = torch.zeros(spec.shape[0])
        for part, own in self._parts.items():
            if own.shift is not None:
                shift[self._spans[part]] += own.shift
                made["shift"] = self._placed(shift)
            if own.weight is not None and is_embedding:
                made["embedding"] = self._placed(own.weight)
            elif own.weight is not None:
                made["weight"] = self._product(own.weight)
        if self._tokens is not None:
            tokens, rows = self._own_tokens(*self._tokens)
            made["tokens"] = tokens.to(self._device)
            if is_embedding and len(rows):
                made["rows"] = self._placed(rows)
            elif len(rows):
                made["head_rows"] = self._product(rows)
        return Change(**made)

    def dora(self, weight: Tensor, file: Path) -> Dora:
        """Magnitudes, and norms of the changed `weight` [outputs, inputs]. After `change`."""
        weight = weight.detach().float().cpu()
        total = self._spec.shape[0]
        # Outputs without magnitudes keep theirs.
        magnitude = torch.full((total,), torch.nan)
        squares = torch.ones(total)
        for part, own in self._parts.items():
            if own.magnitude is None:
                continue
            if own.low is None or own.high is None:
                raise CheckpointError(
                    f"{file}: {self._layer.prefix} has a lora_magnitude_vector, and no lora_A and "
                    "lora_B."
                )
            mine = self._spans[part]
            changed = weight[mine] + own.high.float() @ own.low.float()
            magnitude[mine] = own.magnitude
            squares[mine] = changed.square().sum(1)
        return Dora(magnitude, squares, self._high)

    def _kernels_pair(self) -> Any:
        """A and B for the kernels' own products. None: there is more than these, or the kernels
        cannot add them."""
        layer = self._layer
        if (
            self._low_rank is None
            or self._method is None
            or self._tokens is not None
            or self._spec.kind != "linear"
            or layer.rows is not Rows.FLAT
            or not self._low_rank.takes(self._method)
        ):
            return None
        parts: list[tuple[int, Tensor, Tensor]] = []
        for part, own in self._parts.items():
            has_more = own.magnitude, own.weight, own.shift
            if own.low is None or own.high is None or has_more != (None, None, None):
                return None
            parts.append((self._spans[part].start, own.low, own.high))
        parts.sort(key=lambda part: part[0])
        return self._low_rank.pack(self._method, parts)

    def _pair(self) -> dict[str, Any]:
        """A of all parts one after the other, and B block by block."""
        pairs = [
            (self._spans[part], own.low, own.high)
            for part, own in self._parts.items()
            if own.low is not None and own.high is not None
        ]
        if not pairs:
            return {}
        if self._spec.kind == "embedding":
            [(_, low, high)] = pairs
            return {"table": self._placed(low), "high": self._product(high)}
        pairs.sort(key=lambda pair: pair[0].start)
        where = slice(pairs[0][0].start, pairs[-1][0].stop)
        # Kernels want pairs of inputs, or 16 of float16.
        step = 16 if self._spec.dtype is torch.float16 else 2
        rank = -(-sum(len(low) for _, low, _ in pairs) // step) * step
        narrow = torch.zeros(rank, self._spec.inputs.size)
        wide = torch.zeros(where.stop - where.start, rank)
        at = 0
        for mine, low, high in pairs:
            narrow[at : at + len(low)] = low
            wide[mine.start - where.start : mine.stop - where.start, at : at + len(low)] = high
            at += len(low)
        self._high = wide
        return {"low": self._product(narrow), "high": self._product(wide), "where": where}

    def _own_tokens(self, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The trained tokens of this rank's share of the vocabulary, in order."""
        [shard] = self._spec.outputs
        local, order = (tokens - shard.start).sort()
        held = (local >= 0) & (local < shard.size)
        return local[held], rows[order][held]

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._spec.dtype).contiguous()

    def _product(self, weight: Tensor) -> Product:
        return Product(self._kernels, self._placed(weight))


def of_outputs(tensor: Tensor, shards: Sequence[Shard]) -> Tensor:
    """This rank's rows of a tensor [outputs, ...]. A vocabulary is padded with zeros."""
    pieces = []
    start = 0
    for shard in shards:
        own = tensor[start : start + shard.full][shard.start : shard.start + shard.size]
        if len(own) < shard.size:
            own = torch.cat([own, own.new_zeros(shard.size - len(own), *own.shape[1:])])
        pieces.append(own)
        start += shard.full
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def of_inputs(tensor: Tensor, layer: LinearBase) -> Tensor:
    """This rank's columns of a tensor [..., inputs]."""
    shard = layer.spec.inputs
    return tensor[:, shard.start : shard.start + shard.size]


def span(layer: LinearBase, part: int | None) -> slice:
    """This rank's outputs of one part of a layer; None: of all."""
    sizes = [shard.size for shard in layer.spec.outputs]
    if part is None:
        return slice(0, sum(sizes))
    return slice(sum(sizes[:part]), sum(sizes[: part + 1]))
