"""Interfaces between a budget and the accounts of clients."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Protocol, TypeVar

from toolkit_lm.outputs import RequestOutput
from toolkit_lm.params import RequestOutputKind

Output = TypeVar("Output")

Asked = Callable[[int | None, int], None]
"""A function that is told (max_tokens, number of prompts) of a call that generates."""


class Reservation(Protocol):
    """Tokens that a request may take."""

    def used(self, num_tokens: int) -> None:
        """Counts tokens of prompts and outputs that were computed."""


class Account(Protocol):
    """A client's limits, and the counts of its requests."""

    def run(self, num_sequences: int, num_tokens: int) -> AbstractContextManager[Reservation]:
        """Counts sequences as running, and reserves tokens, until the end of the `with` block.
        Raises the client's error for too many."""


async def counted(
    outputs: AsyncGenerator[Output, None],
    kind: RequestOutputKind,
    each: Callable[[Output], list[RequestOutput]],
    reservation: Reservation,
) -> AsyncGenerator[Output, None]:
    """Passes `outputs` on, and counts their tokens. `each`: the requests' outputs in one item."""
    counts: dict[str, int] = {}
    async with aclosing(outputs):
        async for batch in outputs:
            for output in each(batch):
                tokens = sum(len(sequence.token_ids) for sequence in output.outputs)
                before = counts.get(output.request_id)
                if before is None:
                    reservation.used(output.num_prompt_tokens)
                is_delta = kind is RequestOutputKind.DELTA
                reservation.used(tokens if is_delta else tokens - (before or 0))
                counts[output.request_id] = tokens
            yield batch
