"""EventListener: the object that the hook `toolkit_watch` returns."""

from __future__ import annotations

from typing import Protocol

from toolkit_lm.events import Event


class EventListener(Protocol):
    """Receives the events of one engine. Its methods are called one at a time."""

    def on_event(self, event: Event) -> None:
        """Receives an event, as the hook `toolkit_event` does, so it must be quick. If it raises,
        there is one warning, and it is not called again."""

    def close(self) -> None:
        """The engine has ended, and no event follows. Requests without a last event have ended with
        it. May take at most 2 s."""
