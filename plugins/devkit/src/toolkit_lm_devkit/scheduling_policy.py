"""SchedulingPolicyConformance: what every scheduling policy must do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count, permutations
from typing import Any, ClassVar

from toolkit_lm.config import SchedulerConfig
from toolkit_lm.messages import EngineRequest
from toolkit_lm.params import SamplingParams
from toolkit_lm.scheduler import Request, SchedulingPolicy

from toolkit_lm_devkit.conformance import Conformance

_REQUESTS: list[dict[str, Any]] = [
    {},
    {"prompt_token_ids": [5] * 90},
    {"priority": -3},
    {"priority": 2**62},
    {"arrival_time": 1e6},
    {"deadline": 2e6},
    {"max_output_tokens": 500},
    {"params": SamplingParams(n=3, seed=1)},
    {"context": {"tenant": "a"}},
]


class SchedulingPolicyConformance(Conformance):
    """Subclass it as `class TestMine(SchedulingPolicyConformance)`, and name the policy.

    It is `policy = staticmethod(function)`, or `policy = TheClass`.
    """

    policy: ClassVar[Callable[[Request], tuple[float, ...]] | type[SchedulingPolicy]]
    orders: ClassVar[Sequence[Sequence[Mapping[str, Any]]]] = ()
    """Fields of EngineRequest of requests that are served in this order, in whichever order they
    arrive."""

    def request(self, number: int = 0, **fields: Any) -> Request:
        """A request of one prompt token that arrives at `number` seconds, unless `fields` of
        EngineRequest say otherwise."""
        values = {
            "prompt_token_ids": [5],
            "params": SamplingParams(),
            "max_output_tokens": 4,
            "arrival_time": float(number),
            **fields,
        }
        return Request(EngineRequest(request_id=str(number), **values), count(number * 1000))

    def keys(self, requests: Sequence[Request]) -> list[tuple[float, ...]]:
        """Keys of requests that arrive in this order at an engine of their own."""
        policy = type(self).policy
        key = policy(SchedulerConfig()).key if isinstance(policy, type) else policy
        return [key(request) for request in requests]

    def running(self, policy: SchedulingPolicy) -> list[Request]:
        """Requests of several kinds that run, each at its last token, in the policy's order."""
        requests = [self.request(number, **fields) for number, fields in enumerate(_REQUESTS * 2)]
        for request in requests:
            request.sort_key = (*policy.key(request), request.arrival_time, request.number)
            for seq in request.sequences:
                seq.num_computed_tokens = len(seq.token_ids) - 1
        return sorted(requests, key=lambda request: request.sort_key)

    def test_no_grant_is_above_the_budget_and_all_get_on(self) -> None:
        policy = type(self).policy
        if not isinstance(policy, type):
            return
        made = policy(SchedulerConfig())
        requests = self.running(made)
        total = dict.fromkeys(requests, 0)
        for _ in range(200):
            made.begin_step(requests, [])
            budget = 8
            for request in requests:
                granted = made.grant(request, budget)
                assert 0 <= granted <= budget, f"{granted} tokens are granted of {budget}"
                taken = min(granted, request.num_rows)
                total[request] += taken
                budget -= taken
            assert budget < 8, "none of the requests that run computes anything"
            requests.append(requests.pop(0))
        assert all(total.values()), "a request that runs never computes anything"

    def test_who_gives_way_runs(self) -> None:
        policy = type(self).policy
        if not isinstance(policy, type):
            return
        made = policy(SchedulerConfig())
        running = self.running(made)
        made.begin_step(running, [])
        for position, request in enumerate(running):
            assert made.gives_way(request, running[position:]) in (None, *running[position:]), (
                "who gives way does not run"
            )
        waiting = self.request(99)
        waiting.sort_key = (*made.key(waiting), waiting.arrival_time, waiting.number)
        assert list(made.begin_step(running, [waiting])) in ([], [waiting]), (
            "who may be admitted does not wait"
        )
        assert made.gives_way(waiting, running) in (None, *running), "who gives way does not run"
        assert made.overtakes(waiting, waiting) in (True, False)

    def test_a_key_is_numbers(self) -> None:
        keys = self.keys(
            [self.request(number, **fields) for number, fields in enumerate(_REQUESTS)]
        )
        for fields, key in zip(_REQUESTS, keys, strict=True):
            assert isinstance(key, tuple), f"the key of {fields} is {key!r}, which is no tuple"
            assert all(isinstance(part, int | float) and not math.isnan(part) for part in key), (
                f"the key of {fields} is {key!r}"
            )
        assert len({len(key) for key in keys}) == 1, "keys have several lengths"

    def test_equal_requests_have_equal_keys(self) -> None:
        """Who came first is served first, without the policy's saying so."""
        for fields in _REQUESTS:
            first, second = (self.keys([self.request(7, **fields)]) for _ in range(2))
            assert first == second, f"the key of {fields} depends on more than the request"

    def test_orders(self) -> None:
        for order in self.orders:
            for arrival in permutations(range(len(order))):
                requests = [
                    self.request(number, **fields)
                    for number, fields in zip(arrival, order, strict=True)
                ]
                keys = [
                    (*key, request.arrival_time)
                    for key, request in zip(self.keys(requests), requests, strict=True)
                ]
                assert keys == sorted(keys), (
                    f"{order} are served in another order, where they arrive as {arrival}"
                )
