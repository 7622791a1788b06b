"""Which adapters the requests of a front have: those that wait, and those that run."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from weakref import WeakValueDictionary

from toolkit_lm.events import Event, RequestEvent

from toolkit_lm_lora.share import Use

_FRONT = "lora.front"
_USES = "lora.uses"
"""Keys of a request's context: the token of its front's Usage, and a line for each adapter with
digest and name."""


class Usage:
    """The adapters of requests under way, counted by (digest, name). Thread-safe."""

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex
        self._states: dict[str, bool] = {}
        """By request, whether it runs."""
        self._uses: dict[str, list[tuple[str, str]]] = {}
        self._lock = threading.Lock()
        _FRONTS[self.token] = self

    def context(self, uses: Sequence[Use]) -> dict[str, str]:
        """Returns the context of a request with adapters, for the listener."""
        return {_FRONT: self.token, _USES: "\n".join(f"{use.digest} {use.name}" for use in uses)}

    def on_event(self, event: RequestEvent) -> None:
        with self._lock:
            if event.kind in ("finished", "aborted"):
                self._states.pop(event.request_id, None)
                self._uses.pop(event.request_id, None)
                return
            if event.request_id not in self._uses:
                lines = event.context[_USES].split("\n")
                pairs = [line.split(" ", 1) for line in lines]
                self._uses[event.request_id] = [(digest, name) for digest, name in pairs]
            self._states[event.request_id] = event.kind in ("scheduled", "first_token")

    def names(self) -> tuple[Counter[str], Counter[str]]:
        """How many requests wait and run, by their adapters' names."""
        waiting: Counter[str] = Counter()
        running: Counter[str] = Counter()
        with self._lock:
            for request_id, uses in self._uses.items():
                (running if self._states[request_id] else waiting).update(name for _, name in uses)
        return waiting, running

    def has(self, digest: str) -> bool:
        """Whether a request under way has an adapter."""
        with self._lock:
            return any(digest == own for uses in self._uses.values() for own, _ in uses)


class UsageListener:
    """Tells each front's Usage of its requests."""

    def on_event(self, event: Event) -> None:
        if isinstance(event, RequestEvent) and (token := event.context.get(_FRONT)) is not None:
            usage = _FRONTS.get(token)
            if usage is not None:
                usage.on_event(event)

    def close(self) -> None:
        """Nothing is held."""


_FRONTS: WeakValueDictionary[str, Usage] = WeakValueDictionary()
