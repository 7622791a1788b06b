"""Interfaces between a budget and the accounts of clients."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from toolkit_lm.outputs import RequestOutput
from toolkit_lm.params import RequestOutputKind

Output = TypeVar("Output")

Asked = Callable[[int | None, int], None]
"""A function that is told (max_tokens, number of prompts) of a call that generates."""


class Account(Protocol):
    """A client's limits, and the counts of its requests."""

    def run(self, num_sequences: int) -> AbstractContextManager[None]:
        """Counts sequences as running, until the end of the `with` block. Raises the client's error
        for too many."""

    def used(self, num_tokens: int) -> None:
        """Counts tokens of prompts and outputs."""

    def counted(
        self,
        outputs: AsyncGenerator[Output, None],
        kind: RequestOutputKind,
        each: Callable[[Output], list[RequestOutput]],
    ) -> AsyncGenerator[Output, None]:
        """Passes `outputs` on, and counts their tokens. `each`: the requests' outputs in one
        item."""
