"""What a budget is told of clients, and tells of their requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from toolkit_lm.outputs import RequestOutput
from toolkit_lm.params import RequestOutputKind

Output = TypeVar("Output")

Asked = Callable[[int | None, int], None]
"""(max_tokens, number of prompts) of a call that generates."""


class Account(Protocol):
    """What a client may ask for, and has asked for."""

    def run(self, num_sequences: int) -> AbstractContextManager[None]:
        """For the life of so many sequences. Raises what the client gets for too many."""

    def used(self, num_tokens: int) -> None:
        """Counts tokens of prompts and outputs."""

    def counted(
        self,
        outputs: AsyncGenerator[Output, None],
        kind: RequestOutputKind,
        each: Callable[[Output], list[RequestOutput]],
    ) -> AsyncGenerator[Output, None]:
        """`outputs`, whose tokens are counted. `each`: the outputs of requests in one of them."""
