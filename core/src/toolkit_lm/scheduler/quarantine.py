"""Quarantine: who is to blame for a failed step."""

from __future__ import annotations

from collections.abc import Iterable


class Quarantine:
    """The requests of a failed step. Each is computed alone until it has drawn a token, so that the
    one to blame fails alone."""

    def __init__(self) -> None:
        self.quarantined: list[str] = []
        """Their ids. The first is computed now, the others wait."""

    def isolate(self, request_ids: Iterable[str]) -> None:
        """Takes the place of those that were quarantined before."""
        self.quarantined = list(request_ids)

    def release(self, request_id: str) -> bool:
        """A request has drawn a token, or has ended. True: it was the one that is computed now."""
        if request_id not in self.quarantined:
            return False
        is_first = self.quarantined[0] == request_id
        self.quarantined.remove(request_id)
        return is_first
