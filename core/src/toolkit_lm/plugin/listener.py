"""EventListener: what the hook `toolkit_watch` makes."""

from __future__ import annotations

from typing import Protocol

from toolkit_lm.events import Event


class EventListener(Protocol):
    """Watches one engine. Its methods are called one at a time."""

    def on_event(self, event: Event) -> None:
        """As the hook `toolkit_event`: it must be quick; one that raises is warned about once, and
        called no more."""

    def close(self) -> None:
        """The engine has ended, and no event follows. Requests without a last event have ended with
        it. Takes 2 s at most."""
