"""CpuLowRank: B A x of adapters, computed inside the kernels' products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from toolkit_lm.model import AdaptedRows, LinearMethod, LowRank
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm_cpu import arguments
from toolkit_lm_cpu.added import Added, Pair, StepRows
from toolkit_lm_cpu.arena import Arena
from toolkit_lm_cpu.arguments import LowRankPart
from toolkit_lm_cpu.library import _kernels, product_type
from toolkit_lm_cpu.panels import LANES, PanelLinear, linear, pack
from toolkit_lm_cpu.quantized import QuantizedPanels

_MOST_PARTS = 3
_CHUNK = 8 << 20
"""Bytes of a chunk of adapters, which goes when all of them are dropped."""


class CpuLowRank(LowRank):
    """Adds in float32 to the sums of a product, before they are rounded."""

    def __init__(self) -> None:
        self._arena = Arena(_CHUNK)
        self._step = StepRows()
        self._of: list[Mapping[LinearMethod, Pair]] = []
        """The pairs of each group of the last step."""
        self._rank = 0
        self._methods: set[Any] = set()
        """Methods that have something to add."""

    def takes(self, method: LinearMethod) -> bool:
        if isinstance(method, QuantizedPanels):
            return not method.is_halved
        return type(method) is PanelLinear and method.packed is not None and not method.is_halved

    def pack(self, method: LinearMethod, parts: Sequence[tuple[int, Tensor, Tensor]]) -> Pair:
        assert isinstance(method, PanelLinear | QuantizedPanels)
        outputs = method.outputs
        filled = -(-outputs // LANES) * LANES
        ends = [first + len(high) for first, _, high in parts]
        fit = all(
            first % LANES == 0 and (end % LANES == 0 or end == outputs)
            for (first, _, _), end in zip(parts, ends, strict=True)
        )
        if not fit or len(parts) > _MOST_PARTS:
            parts = [_joined(parts, outputs)]
        type = product_type(method.dtype, method.inputs)
        lows: list[Tensor] = []
        made: list[LowRankPart] = []
        tensors: list[Tensor] = []
        at = 0
        for first, low, high in parts:
            rank = -(-len(low) // LANES) * LANES
            lows.append(F.pad(low.to(method.dtype), (0, 0, 0, rank - len(low))))
            wide = F.pad(high.to(method.dtype), (0, rank - high.shape[1])).contiguous()
            tensors.append(pack(wide, type, self._arena))
            last = min(filled, -(-(first + len(high)) // LANES) * LANES) // LANES
            made.append(LowRankPart(tensors[-1].data_ptr(), first // LANES, last, at, rank))
            at += rank
        tensors.append(pack(torch.cat(lows).contiguous(), type, self._arena))
        described = _kernels.low_rank(
            arguments.LowRank(
                type,
                tensors[-1].data_ptr(),
                method.inputs,
                at,
                *made,
                *([LowRankPart()] * (_MOST_PARTS - len(made))),
            )
        )
        return Pair(described, tuple(tensors), at, outputs, type)

    def product(self, pair: Pair, x: Tensor) -> Tensor:
        step = StepRows()
        step.put([(torch.arange(len(x)).numpy(), 1.0)], pair.rank, len(x))
        added = Added(step, _kernels.low_ranks((pair.described,), None), (pair,))
        return linear(pair.type, x, None, pair.outputs, None, 0, False, None, added)

    def set(self, groups: Sequence[AdaptedRows], num_rows: int) -> None:
        of = [group.pairs for group in groups]
        if len(of) != len(self._of) or any(
            mine is not theirs for mine, theirs in zip(of, self._of, strict=True)
        ):
            self._point(of)
        if groups:
            pieces = [(group.rows, group.scale) for group in groups]
            self._step.put(pieces, self._rank, num_rows)

    def _point(self, of: list[Mapping[LinearMethod, Pair]]) -> None:
        """Tells each method its pairs, by group."""
        methods: dict[Any, None] = dict.fromkeys(method for pairs in of for method in pairs)
        for method in self._methods - methods.keys():
            method.added = None
        following: object = None
        for method in reversed(methods):
            pairs = tuple(those.get(method) for those in of)
            described = tuple(None if pair is None else pair.described for pair in pairs)
            following = _kernels.low_ranks(described, following)
            method.added = Added(self._step, following, pairs)
        self._methods = set(methods)
        self._of = of
        self._rank = max((pair.rank for pairs in of for pair in pairs.values()), default=0)


def _joined(
    parts: Sequence[tuple[int, Tensor, Tensor]], outputs: int
) -> tuple[int, Tensor, Tensor]:
    """One part in place of several: B has a block for each."""
    rank = sum(len(low) for _, low, _ in parts)
    wide = torch.zeros(outputs, rank)
    at = 0
    for first, low, high in parts:
        wide[first : first + len(high), at : at + len(low)] = high
        at += len(low)
    return 0, torch.cat([low.float() for _, low, _ in parts]), wide
