"""What a bound on waiting requests is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from toolkit_lm.messages import EngineRequest


class WaitingRequests(Protocol):
    """Is told which requests wait for a place in the batch. What may be added to them, its owner
    checks before."""

    def add(self, batch: Sequence[EngineRequest]) -> None:
        """They were sent to the engine."""

    def admit(self, request_ids: Iterable[str]) -> None:
        """They have left the queue for the batch."""

    def discard(self, request_id: str) -> None:
        """It has ended. Unknown ones are no error."""
