"""The page's view of the engine."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from toolkit_lm.events import Event, LoadEvent, RequestEvent, StepEvent

from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.watched import Watched, engine_states, total_load

PERIOD = 0.4
"""Seconds from one view to the next."""
_EARLY = 0.9
"""Part of a period after which a new view is made. Onlookers are served that much earlier than the
clock."""
_FIGURES_PERIOD = 2.0
"""Seconds from one reading of the metrics to the next. A reading takes a millisecond."""
_MOST_EVENTS = 20_000
_MOST_STEPS = 120
_MOST_REQUESTS = 1_000
_SHOWN_REQUESTS = 40

_HISTOGRAMS = {
    "first_token": "toolkit_lm_time_to_first_token_seconds",
    "inter_token": "toolkit_lm_inter_token_latency_seconds",
    "queue": "toolkit_lm_request_queue_time_seconds",
    "whole": "toolkit_lm_e2e_request_latency_seconds",
}
_COUNTERS = {
    "finished": "toolkit_lm_requests_finished",
    "aborted": "toolkit_lm_requests_aborted",
    "refused": "toolkit_lm_requests_refused",
    "preempted": "toolkit_lm_preemptions",
}


class Watch:
    """Makes views of an engine, from its events and the metrics. Without an onlooker it takes in no
    events.

    Events come in any thread. The event loop calls all else.
    """

    def __init__(self, metrics: Metrics, *, shows_requests: bool = True) -> None:
        self._metrics = metrics
        self._shows_requests = shows_requests
        self._events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self._requests: dict[str, dict[str, Any]] = {}
        self._num_restarts = 0
        self._view: dict[str, Any] = {}
        self._view_time = self._figures_time = 0.0
        self.num_onlookers = 0

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Counts an onlooker, until the end of the `with` block."""
        self.num_onlookers += 1
        self._metrics.tap = self._events.append
        try:
            yield
        finally:
            self.num_onlookers -= 1
            if not self.num_onlookers:
                self._metrics.tap = None
                self._events.clear()
                self._requests.clear()

    def view(self, engine: Watched) -> dict[str, Any]:
        """The engine as it is now. Onlookers who ask at about the same time get the same view."""
        now = time.monotonic()
        if now - self._view_time >= PERIOD * _EARLY:
            seconds = min(now - self._view_time, 10 * PERIOD)
            self._view = self._made(engine, now, seconds)
            self._view_time = now
        return self._view

    def _made(self, engine: Watched, now: float, seconds: float) -> dict[str, Any]:
        if engine.num_restarts != self._num_restarts and not getattr(engine, "engines", ()):
            # They have ended with the engine, and no event says so.
            self._requests.clear()
            self._num_restarts = engine.num_restarts
        (steps, load) = self._drain()
        figures = {}
        if now - self._figures_time >= _FIGURES_PERIOD:
            figures = self._read_metrics()
            self._figures_time = now
        health = engine.health()
        totals = self._metrics.totals
        return {
            "type": "view",
            "time": time.time(),
            "seconds": seconds,
            "status": health.status,
            "reason": health.reason,
            "restarts": engine.num_restarts,
            "queued_tokens": engine.num_queued_tokens,
            "load": _load(load),
            "engines": [
                {**state, "load": _load(self._metrics.loads.get(state["engine"]))}
                for state in engine_states(engine)
            ],
            "num_steps": len(steps),
            "num_tokens": sum(step.num_tokens for step in steps),
            "num_output_tokens": sum(step.num_output_tokens for step in steps),
            "steps": [
                [round(step.duration * 1000, 3), step.num_tokens] for step in steps[-_MOST_STEPS:]
            ],
            "tokens": {"prompt": totals.prompt, "cached": totals.cached, "output": totals.output},
            "requests": self._listed(now) if self._shows_requests else None,
            **figures,
        }

    def _drain(self) -> tuple[list[StepEvent], LoadEvent | None]:
        """The steps since the last call, and the load at its highest. Events of requests are
        recorded."""
        steps: list[StepEvent] = []
        loads: defaultdict[int, list[LoadEvent]] = defaultdict(list)
        for _ in range(len(self._events)):
            match event := self._events.popleft():
                case StepEvent():
                    steps.append(event)
                case LoadEvent():
                    loads[event.engine].append(event)
                case RequestEvent() if self._shows_requests:
                    self._note(event)
        most = {
            engine: max(events, key=lambda load: load.num_running + load.num_waiting)
            for engine, events in loads.items()
        }
        return steps, total_load((self._metrics.loads | most).values())

    def _note(self, event: RequestEvent) -> None:
        if event.kind in ("finished", "aborted"):
            self._requests.pop(event.request_id, None)
            return
        state = {"queued": "waiting", "preempted": "preempted"}.get(event.kind, "running")
        first_token = (
            None if event.first_token_time is None else event.first_token_time - event.arrival_time
        )
        self._requests[event.request_id] = {
            "state": state,
            "arrival": event.arrival_time,
            "num_prompt_tokens": event.num_prompt_tokens,
            "num_cached_tokens": event.num_cached_tokens,
            "num_sequences": event.num_sequences,
            "first_token": first_token,
        }
        if len(self._requests) > _MOST_REQUESTS:
            del self._requests[next(iter(self._requests))]

    def _listed(self, now: float) -> list[dict[str, Any]]:
        """The requests to show: those that run before those that wait, the oldest first. Nothing
        tells whose they are."""
        ordered = sorted(
            self._requests.items(),
            key=lambda request: (request[1]["state"] != "running", request[1]["arrival"]),
        )
        return [
            {"id": name[-12:], **request, "age": now - request["arrival"]}
            for name, request in ordered[:_SHOWN_REQUESTS]
        ]

    def _read_metrics(self) -> dict[str, Any]:
        families = {family.name: family for family in self._metrics.registry.collect()}
        histograms: dict[str, Any] = {}
        for name, full in _HISTOGRAMS.items():
            samples = families[full].samples
            buckets = [
                (float(s.labels["le"]), s.value) for s in samples if s.name.endswith("_bucket")
            ]
            histograms[name] = {
                "bounds": [bound for bound, _ in buckets if bound != float("inf")],
                "counts": [count for _, count in buckets],
                "sum": sum(s.value for s in samples if s.name.endswith("_sum")),
            }
        counts = {
            name: sum(s.value for s in families[full].samples if s.name.endswith("_total"))
            for name, full in _COUNTERS.items()
        }
        return {"histograms": histograms, "counts": counts}


def _load(load: LoadEvent | None) -> dict[str, int] | None:
    """The load as a mapping. None before the first step."""
    if load is None:
        return None
    return {
        "running": load.num_running,
        "waiting": load.num_waiting,
        "used": load.num_used_blocks,
        "cached": load.num_cached_blocks,
        "total": load.num_total_blocks,
        "host_used": load.num_used_host_blocks,
        "host_total": load.num_total_host_blocks,
    }
