"""Dispatch: which CUDA graph a step replays, and how far it is padded. Nothing here needs a GPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from toolkit_lm.attention import BatchLimits, GraphSupport

_MOST_DEFAULT = 512
"""The largest default size. A larger step takes long enough to hide the launch of its kernels."""


class Mode(StrEnum):
    """Values of the option `cudagraph_mode`."""

    NONE = "none"
    PIECEWISE = "piecewise"
    """Graphs of the parts between attention, in all steps."""
    FULL = "full"
    """Graphs of the whole pass, attention included, in all steps."""
    FULL_DECODE_ONLY = "full_decode_only"
    """Graphs of the whole pass in decode steps. Other steps have no graph."""
    FULL_AND_PIECEWISE = "full_and_piecewise"
    """Graphs of the whole pass in decode steps, and of the parts in others."""


class Kind(StrEnum):
    """Kind of a step's replay: no graph, a graph per part, or one graph."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


class Run(NamedTuple):
    """How one step runs. It is also the key of the step's graph."""

    kind: Kind
    num_tokens: int
    """Number of tokens to which the step is padded."""
    num_rows: int = 0
    """Number of rows to which the step is padded in a graph of the whole pass, else 0."""
    max_query_len: int = 0
    """Most tokens of a row in a graph of the whole pass, else 0."""


NO_GRAPH = Run(Kind.NONE, 0)


def default_sizes(limits: BatchLimits) -> list[int]:
    """The default capture sizes: 1, 2, 4, multiples of 8 up to 256, multiples of 16 up to 512.

    The largest is twice the rows of a step, its tokens, or 512, whichever is least.
    """
    most = min(2 * limits.num_rows, limits.num_tokens, _MOST_DEFAULT)
    return sorted(
        size
        for size in {1, 2, 4, *range(8, 257, 8), *range(272, _MOST_DEFAULT + 1, 16), most}
        if size <= most
    )


def settle(asked: Mode, supports: Mapping[str, GraphSupport | str]) -> tuple[Mode, str | None]:
    """The mode that the attention backends allow, and why it differs from `asked`. None: it does
    not differ."""
    backend, answer = min(
        supports.items(),
        key=lambda pair: GraphSupport.of(pair[1]),
        default=("none", GraphSupport.NEVER),
    )
    support = GraphSupport.of(answer)
    if asked in (Mode.NONE, Mode.PIECEWISE) or support is GraphSupport.ALWAYS:
        return asked, None
    if support is GraphSupport.NEVER:
        why = f" ({answer})" if isinstance(answer, str) else ""
        return (
            Mode.PIECEWISE,
            (
                f"graphs of the attention backend {backend!r} are not possible{why}, so "
                "attention stays outside"
            ),
        )
    if asked is Mode.FULL:
        return (
            Mode.FULL_AND_PIECEWISE,
            f"the attention backend {backend!r} can be in graphs of decode steps only",
        )
    return asked, None


@dataclass(frozen=True)
class Dispatcher:
    """Chooses a graph for each step. `mode` is one that `support` allows: see `settle`."""

    mode: Mode
    support: GraphSupport
    """The least support among the model's attention backends."""
    sizes: Sequence[int]
    """Capture sizes as numbers of tokens: ascending, without duplicates, none larger than a
    step."""
    limits: BatchLimits
    query_len: int = 1
    """Tokens per row in decode steps with speculative tokens. 1: there are none."""

    def dispatch(
        self, num_rows: int, num_tokens: int, max_query_len: int, *, whole: bool = True
    ) -> Run:
        """Chooses how a step runs.

        `max_query_len`: the tokens of the longest row. `whole`: whether a graph may hold attention.
        """
        if whole and self.mode not in (Mode.NONE, Mode.PIECEWISE):
            if num_rows * max_query_len == num_tokens and max_query_len in self._uniform_lengths():
                size = self._fit(num_tokens, self.uniform_sizes(max_query_len))
                if size is not None:
                    return Run(Kind.FULL, size, size // max_query_len, max_query_len)
            size = self._fit(num_tokens, self.sizes) if self._has_mixed() else None
            # Tokens of padding need a row of padding.
            if size is not None and (size == num_tokens or num_rows < self.limits.num_rows):
                return Run(Kind.FULL, size, self.limits.num_rows, size)
        size = self._fit(num_tokens, self.sizes) if self._has_parts() else None
        return NO_GRAPH if size is None else Run(Kind.PIECEWISE, size)

    def graphs(self) -> list[Run]:
        """All graphs that `dispatch` can return, the largest first. Smaller graphs then reuse its
        memory."""
        return sorted(set(self._graphs()), key=lambda run: run[1:], reverse=True)

    def uniform_sizes(self, query_len: int) -> list[int]:
        """Sizes rounded up to whole rows of `query_len` tokens, up to the most rows of a step."""
        rows = sorted({-(-size // query_len) for size in self.sizes})
        most = min(self.limits.num_rows, self.limits.num_tokens // query_len)
        return [count * query_len for count in rows if count <= most]

    def _graphs(self) -> Iterator[Run]:
        if self.mode not in (Mode.NONE, Mode.PIECEWISE):
            for length in self._uniform_lengths():
                yield from (
                    Run(Kind.FULL, size, size // length, length)
                    for size in self.uniform_sizes(length)
                )
        if self._has_mixed():
            yield from (Run(Kind.FULL, size, self.limits.num_rows, size) for size in self.sizes)
        if self._has_parts():
            yield from (Run(Kind.PIECEWISE, size) for size in self.sizes)

    def _uniform_lengths(self) -> set[int]:
        """Numbers of tokens per row for which a uniform step may be one graph."""
        if self.support is GraphSupport.NEVER:
            return set()
        return {1} if self.support is GraphSupport.DECODE else {1, self.query_len}

    def _has_mixed(self) -> bool:
        return self.mode is Mode.FULL and self.support is GraphSupport.ALWAYS

    def _has_parts(self) -> bool:
        return self.mode in (Mode.PIECEWISE, Mode.FULL_AND_PIECEWISE)

    @staticmethod
    def _fit(num_tokens: int, sizes: Sequence[int]) -> int | None:
        """The smallest size of at least `num_tokens`, or None."""
        place = bisect_left(sizes, num_tokens)
        return sizes[place] if place < len(sizes) else None
