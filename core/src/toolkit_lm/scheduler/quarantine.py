"""Quarantine: finds the request that caused a failed step."""

from __future__ import annotations

from collections.abc import Iterable


class Quarantine:
    """The requests of a failed step. Each is computed alone until it has sampled a token, so that
    the faulty one fails alone."""

    def __init__(self) -> None:
        self.quarantined: list[str] = []
        """Ids of the quarantined requests. The first one is computed now, and the others wait."""

    def isolate(self, request_ids: Iterable[str]) -> None:
        """Quarantines these requests in place of the present ones."""
        self.quarantined = list(request_ids)

    def release(self, request_id: str) -> bool:
        """Releases a request that has sampled a token or ended. Returns True if it was the one
        computed now."""
        if request_id not in self.quarantined:
            return False
        is_first = self.quarantined[0] == request_id
        self.quarantined.remove(request_id)
        return is_first
