"""Random renderings, messages, aborts, losses and restarts of two fronts and an engine: both sides
agree after every message."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from toolkit_lm.engine import wire
from toolkit_lm.engine.feature_mirror import EngineFeatures, FeatureMirror
from toolkit_lm.messages import Array, EngineRequest, MultiModalFeatureSpec, PlaceholderRange
from toolkit_lm.params import SamplingParams
from toolkit_lm.processing.pinned_rendering import PinnedRendering
from toolkit_lm.renderer import Rendered

KIB = 1024
SIZES = {"a": 1, "b": 1, "c": 2, "d": 3, "e": 5, "f": 9, "g": 0}
"""Sizes of items' data, in KiB."""
BUDGETS = [0, 2, 4, 5, 6, 8, 9, 12, 16, 1000]
"""In KiB. Each item takes one more than its data."""
FRONTS = st.integers(0, 1)
ITEMS = st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=3)


class Prepared:
    """A request in a front, before it is sent. If it is garbage collected, it was given up."""

    def __init__(self, name, front, items, params) -> None:
        self.mirror = front.mirror
        self.rendering = PinnedRendering(lambda: render(front, items))
        rendered = self.rendering()
        self.message = EngineRequest(
            request_id=name,
            prompt_token_ids=rendered.token_ids,
            params=params,
            features=rendered.features,
        )


class Sent(NamedTuple):
    """A message in the socket, and what the front's mirror was after it."""

    data: bytes
    held: set[str]


class Front:
    def __init__(self, number: int, budget: int) -> None:
        self.number = number
        self.budget = budget
        self.prepared: list[Prepared] = []
        self.requests: dict[str, Prepared | None] = {}
        """Sent and not aborted, by id; None: sent twice."""
        self.connect()

    def connect(self) -> None:
        """To an engine that knows nothing of it."""
        self.mirror = FeatureMirror(self.budget)
        self.socket: deque[Sent] = deque()
        self.reports: deque[dict[str, list[str]]] = deque()
        self.lost: set[str] = set()
        """Items that the engine has forgotten unasked, and not been sent since."""
        self.requests.clear()
        self.last_use: dict[str, int] = {}

    @property
    def held(self) -> set[str]:
        return set(self.mirror.held_keys(100))


def content(item: str) -> np.ndarray:
    return np.full(SIZES[item] * KIB, ord(item), np.uint8)


def render(front: Front, items: list[str]) -> Rendered:
    token_ids = [1]
    features = []
    for item in items:
        held = front.mirror.get(item)
        data = (
            {"pixels": Array.of(content(item)), "none": Array.of(np.zeros(0))}
            if held is None
            else None
        )
        tokens, layout = (
            ([ord(item)] * 3, {"grid": [1.0, SIZES[item]]})
            if held is None
            else (held.token_ids, held.layout)
        )
        place = PlaceholderRange(offset=len(token_ids), length=3)
        features.append(
            MultiModalFeatureSpec(
                modality="image", mm_identifier=item, mm_position=place, data=data, layout=layout
            )
        )
        token_ids += [*tokens, 2]
    return Rendered(token_ids, features)


class FeatureMachine(RuleBasedStateMachine):
    @initialize(budgets=st.tuples(st.sampled_from(BUDGETS), st.sampled_from(BUDGETS)))
    def start(self, budgets):
        self.fronts = [Front(number, budget * KIB) for number, budget in enumerate(budgets)]
        self.engine = EngineFeatures()
        self.num_requests = self.num_uses = 0

    @rule(front=FRONTS, items=ITEMS, shared=st.booleans())
    def render(self, front, items, shared):
        """It may be sent much later, or never."""
        self.num_requests += 1
        params = PARAMS if shared else SamplingParams(seed=self.num_requests)
        front = self.fronts[front]
        front.prepared.append(Prepared(str(self.num_requests), front, items, params))

    @rule(front=FRONTS, items=ITEMS)
    def serve(self, front, items):
        """At once, but for what is in the socket already."""
        self.render(front, items, shared=True)
        self.send(front, count=1, last=True)
        while self.fronts[front].socket:
            self.deliver_to_engine(self.fronts[front])

    @rule(front=FRONTS, count=st.integers(1, 4), last=st.booleans())
    def send(self, front, count, last):
        """In another order than they were rendered in."""
        front = self.fronts[front]
        chosen = [
            front.prepared.pop(-1 if last else 0) for _ in range(min(count, len(front.prepared)))
        ]
        self.send_now(front, chosen)
        front.requests.update({one.message.request_id: one for one in chosen})

    def send_now(self, front: Front, chosen: list[Prepared]) -> None:
        for one in chosen:
            if front.mirror.lacks(one.message):
                one.message.features = one.rendering().features
            one.rendering.release()
        with front.mirror.sending([one.message for one in chosen]) as (requests, evicted):
            data = wire.encode(wire.add(requests, evicted))
        assert all(feature.data is None for one in chosen for feature in one.message.features)
        front.socket.append(Sent(data, front.held))
        for name in (feature.mm_identifier for one in chosen for feature in one.message.features):
            self.num_uses += 1
            front.last_use[name] = self.num_uses
        assert front.mirror.held_keys(100) == sorted(
            front.held, key=lambda name: -front.last_use[name]
        )
        sizes = {name: front.mirror._held[name].num_bytes for name in front.held}
        assert front.mirror.num_bytes == sum(sizes.values())
        if front.mirror.num_bytes > front.budget:
            assert set(front.mirror._pins) >= front.held, "no more than must be"

    @rule(front=FRONTS)
    def fail_to_send(self, front):
        """Nothing has changed, but for its pins."""
        front = self.fronts[front]
        if front.prepared:
            one = front.prepared.pop()
            before = front.mirror.held_keys(100)
            features = one.message.features
            with (
                pytest.raises((TypeError, ValueError)),
                front.mirror.sending([one.message]) as (requests, _),
            ):
                requests[0].context = {"key": object()}
                wire.encode(wire.add(requests))
            assert (front.mirror.held_keys(100), one.message.features) == (before, features)

    @rule(front=FRONTS, number=st.integers(0, 9))
    def give_up(self, front, number):
        """Before it is sent."""
        prepared = self.fronts[front].prepared
        if prepared:
            del prepared[number % len(prepared)]

    @rule(front=FRONTS, number=st.integers(0, 9))
    def abort(self, front, number):
        """After it was sent. Its message may be in the socket still."""
        requests = self.fronts[front].requests
        if requests:
            del requests[sorted(requests)[number % len(requests)]]

    @rule(front=FRONTS)
    def deliver(self, front):
        front = self.fronts[front]
        if front.socket:
            self.deliver_to_engine(front)

    def deliver_to_engine(self, front: Front) -> None:
        message, held = front.socket.popleft()
        command = wire.decode_command(message)
        requests = wire.added(command)
        carried = {
            feature.mm_identifier
            for one in requests
            for feature in one.features
            if feature.data is not None
        }
        missing = self.engine.fill(front.number, requests, command.evicted)
        front.lost &= held - carried
        assert self.engine._fronts[front.number] == held - front.lost
        for one in requests:
            if one.request_id not in missing:
                assert one.prompt_token_ids == render_alone(one)
                for feature in one.features:
                    assert np.array_equal(
                        feature.data["pixels"].to_numpy(), content(feature.mm_identifier)
                    )
        if missing:
            assert {name for names in missing.values() for name in names} <= self.was_lost
            front.reports.append(missing)

    @precondition(lambda self: any(front.reports for front in self.fronts))
    @rule()
    def report(self):
        """Sends again, once, the data that the engine asks for."""
        front = next(front for front in self.fronts if front.reports)
        for request_id, names in front.reports.popleft().items():
            front.mirror.forget(names)
            if (prepared := front.requests.get(request_id)) is not None:
                front.requests[request_id] = None
                prepared.message.features = prepared.rendering().features
                self.send_now(front, [prepared])

    was_lost: frozenset[str] = frozenset()

    @precondition(lambda self: any(self.engine._fronts.values()))
    @rule(number=st.integers(0, 99))
    def lose(self, number):
        """An engine that does not do as it is told."""
        held = [
            (front, item)
            for front in self.fronts
            for item in sorted(self.engine._fronts.get(front.number, ()))
        ]
        front, item = held[number % len(held)]
        self.engine._forget(self.engine._fronts[front.number], [item])
        front.lost.add(item)
        self.was_lost |= {item}

    @rule(which=st.integers(0, 9))
    def restart(self, which):
        """Restarts the engine, or a front. Requests already rendered rely on the old engine."""
        if which == 0:
            self.engine = EngineFeatures()
            for front in self.fronts:
                front.connect()
        elif which <= 2:
            self.engine.leave(which - 1)
            self.fronts[which - 1].prepared.clear()
            self.fronts[which - 1].connect()

    @invariant()
    def what_was_found_stays(self):
        for front in getattr(self, "fronts", ()):
            for one in front.prepared:
                lacking = {
                    feature.mm_identifier
                    for feature in one.message.features
                    if feature.data is None
                } - front.held
                assert one.mirror is not front.mirror or lacking <= self.was_lost

    @invariant()
    def data_is_kept_while_a_front_has_it(self):
        if hasattr(self, "engine"):
            assert set(self.engine._data) == set().union(*self.engine._fronts.values())

    def teardown(self):
        """Whatever is on its way arrives: both sides hold the same."""
        for front in getattr(self, "fronts", ()):
            front.prepared.clear()
            self.send_now(
                front,
                [Prepared("last", front, [], PARAMS), Prepared("media", front, ["a"], PARAMS)],
            )
            while front.socket:
                self.deliver_to_engine(front)
            assert self.engine._fronts[front.number] == front.held - front.lost
            assert not front.mirror._pins
            assert front.mirror.num_bytes <= front.budget


def render_alone(request: EngineRequest) -> list[int]:
    """The tokens of a prompt with these items."""
    return [1] + [
        token for feature in request.features for token in [ord(feature.mm_identifier)] * 3 + [2]
    ]


PARAMS = SamplingParams()

TestFeatures = FeatureMachine.TestCase
TestFeatures.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
