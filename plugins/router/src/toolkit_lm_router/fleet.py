"""The backends: their state, their models, and which of them may get a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from toolkit_lm.errors import nearest
from toolkit_lm_server.errors import ApiError

from toolkit_lm_router.options import RouterOptions
from toolkit_lm_router.policy import Choice, RoutingPolicy, Wanted, mark_of

Role = Literal["serve", "prefill"]
"""serve: it answers requests. prefill: it computes prompts for those that do."""
State = Literal["starting", "ready", "draining", "down"]
"""starting: not asked yet. down: failed, or not healthy."""

_FAILURES = 3
"""Answers of 5xx in turn after which a backend rests."""
_REST = 5.0
"""Seconds that it then gets no request, and most seconds of a Retry-After that are obeyed."""
_MOST_REST = 60.0


@dataclass(slots=True, eq=False)
class Backend:
    """One server."""

    url: str
    number: int
    """A small number, which no other backend has at the time."""
    most: int
    """Most requests at a time."""
    role: Role = "serve"
    state: State = "starting"
    reason: str = "its health is not known yet"
    models: tuple[str, ...] = ()
    cards: tuple[dict[str, object], ...] = ()
    """Its models, as it describes them."""
    is_ours: bool = False
    """It is a server of toolkit-lm."""
    started: object = None
    """A mark of its start; another one means that it has lost its cache."""
    load: int = 0
    """Requests under way."""
    resting_until: float = 0.0
    num_failures: int = 0
    """Failures in turn."""
    num_requests: int = 0
    num_retries: int = 0
    """Requests that failed here, and were sent elsewhere."""
    num_migrations: int = 0
    """Streams that broke off here, and went on elsewhere."""
    num_chunks: int = 0
    """Chunks of all prompts that were sent."""
    num_hits: int = 0
    """Chunks of these that it had had before."""
    is_followed: bool = False
    """Its KV events are followed."""
    num_event_gaps: int = 0
    """Times that KV events of it were missed."""
    queue_seconds: float = 0.0
    """Seconds that its requests have waited here before they were sent."""
    mark: int = field(init=False)
    """64 bits that stand for it in all routers."""

    def __post_init__(self) -> None:
        self.mark = mark_of(self.url)

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def has_room(self) -> bool:
        return self.load < self.most and self.resting_until <= time.monotonic()


@dataclass(slots=True, eq=False)
class _Group:
    """The backends that serve one model."""

    backends: list[Backend] = field(default_factory=list)
    allowed: int = 0
    """Their numbers, as bits."""


class Fleet:
    """All backends. Only the event loop uses it."""

    def __init__(self, options: RouterOptions, *, has_peers: bool = False) -> None:
        """`has_peers`: other routers have the same backends."""
        self.policy = RoutingPolicy(
            options.prefix_match,
            options.balance,
            options.max_prefix_bytes,
            options.kv_events,
            has_peers,
        )
        self._most = options.max_backend_requests
        self.backends: dict[str, Backend] = {}
        """By URL."""
        self._by_number: dict[int, Backend] = {}
        self._groups: dict[tuple[Role, str | None], _Group] = {}
        self.changed: Callable[[], None] = lambda: None
        """Is called when a request may have got a place."""
        self.tend: Callable[[], None] = lambda: None
        """Is called when backends were added or removed."""
        for url in dict.fromkeys(options.backend):
            self.add(url)
        for url in dict.fromkeys(options.prefill_backend):
            self.add(url, "prefill")

    def add(self, url: str, role: Role = "serve") -> Backend:
        """A new backend. It gets requests when it is healthy. One that is drained takes part
        again."""
        if url in self.backends:
            found = self.backends[url]
            if found.state == "draining":
                self.set_state(found, "starting", "it was added again")
            return found
        number = next(n for n in range(len(self.backends) + 1) if n not in self._by_number)
        made = Backend(url, number, self._most, role)
        self.backends[url] = self._by_number[number] = made
        self.tend()
        return made

    def remove(self, backend: Backend) -> None:
        """Forgets a backend. Requests that it has go on."""
        self.set_state(backend, "draining", "it was removed")
        del self.backends[backend.url]
        del self._by_number[backend.number]
        self.policy.index.clear(backend.number)
        self.tend()

    def set_state(self, backend: Backend, state: State, reason: str = "") -> None:
        """A backend's state has changed. One that is down has lost its cache."""
        if backend.state == "draining" and state in ("ready", "down"):
            return
        was = backend.state
        backend.state = state
        backend.reason = reason
        if state == "down":
            self.policy.index.clear(backend.number)
        if was != state:
            self.regroup()

    def set_models(
        self, backend: Backend, cards: Sequence[dict[str, object]], started: object
    ) -> None:
        """A backend has told of its models."""
        if backend.started is not None and started != backend.started:
            self.policy.index.clear(backend.number)
        backend.started = started
        backend.cards = tuple(cards)
        models = tuple(str(card["id"]) for card in cards)
        if models != backend.models:
            backend.models = models
            self.regroup()

    def regroup(self) -> None:
        """Finds anew who serves which model."""
        groups: dict[tuple[Role, str | None], _Group] = {}
        for backend in self.backends.values():
            if backend.is_ready:
                for name in (None, *backend.models):
                    group = groups.setdefault((backend.role, name), _Group())
                    group.backends.append(backend)
                    group.allowed |= 1 << backend.number
        self._groups = groups
        self.changed()

    @property
    def adapters(self) -> set[str]:
        """Names of models that are adapters of others."""
        cards = (card for b in self.backends.values() for card in b.cards)
        return {str(card["id"]) for card in cards if card.get("parent") is not None}

    @property
    def known_models(self) -> list[str]:
        """Names of the models of all backends, of those that are down too."""
        return [*dict.fromkeys(name for b in self.backends.values() for name in b.models)]

    def check_model(self, model: str | None) -> None:
        """Raises ApiError (404) for a model that no backend has."""
        if model is None or ("serve", model) in self._groups or not self.backends:
            return
        known = self.known_models
        waits = any(b.state == "starting" for b in self.backends.values())
        if model not in known and not (waits and not known):
            raise self.unknown(model, known)

    @staticmethod
    def unknown(model: str, known: Collection[str]) -> ApiError:
        """The error (404) of a model that there is not. `known`: names that the client may use."""
        return ApiError(
            404,
            f"No backend serves the model {model[:100]!r}. {nearest(model, known)}",
            param="model",
            code="model_not_found",
        )

    def num_ready(self, model: str | None, without: Collection[int] = ()) -> int:
        """Number of backends that serve the model, whether they have room or not."""
        group = self._groups.get(("serve", model))
        return 0 if group is None else sum(b.number not in without for b in group.backends)

    def choose(
        self,
        model: str | None,
        wanted: Wanted,
        without: Collection[int] = (),
        role: Role = "serve",
    ) -> tuple[Backend, Choice] | None:
        """The backend of a request. None: none has room."""
        group = self._groups.get((role, model))
        if group is None:
            return None
        total = sum(b.load for b in group.backends) if len(group.backends) <= 64 else None
        if total is None:
            # A sample of many: the mean moves little.
            drawn = self.policy.random.choices(group.backends, k=64)
            total = sum(b.load for b in drawn) * len(group.backends) // 64
        choice = self.policy.choose(
            wanted, group.backends, self._by_number, group.allowed, total, without
        )
        return None if choice is None else (self._by_number[choice.number], choice)

    def begin(self, backend: Backend, wanted: Wanted, choice: Choice) -> None:
        """A backend gets a request."""
        backend.load += 1
        backend.num_requests += 1
        backend.num_chunks += len(wanted.digests)
        backend.num_hits += choice.num_chunks
        self.policy.sent(wanted, backend.number)

    def end(self, backend: Backend) -> None:
        """A request has left a backend."""
        backend.load -= 1
        self.changed()

    def failed(self, backend: Backend, reason: str, *, is_gone: bool) -> None:
        """A request has failed. `is_gone`: the backend cannot be reached."""
        backend.num_failures += 1
        if is_gone:
            self.set_state(backend, "down", reason)
        elif backend.num_failures >= _FAILURES:
            self.rest(backend, _REST)

    def rest(self, backend: Backend, seconds: float) -> None:
        """A backend wants no requests for a time."""
        until = time.monotonic() + min(max(seconds, 0.0), _MOST_REST)
        backend.resting_until = max(backend.resting_until, until)
