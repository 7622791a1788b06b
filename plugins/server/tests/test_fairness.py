"""The scheduling policy "fair": turns between clients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import SchedulerConfig
from toolkit_lm_devkit import SchedulingPolicyConformance
from toolkit_lm_server.fairness import FairPolicy


class TestFair(SchedulingPolicyConformance):
    policy = FairPolicy


def served(arrivals, *, policy="fair", **options) -> list[str]:
    """The clients of requests (client, prompt tokens, output tokens), in the order of their ends. One is served at a time."""
    with LLM("tiny", scheduling_policy=policy, max_num_seqs=1, **options) as llm:
        for number, (client, length, output) in enumerate(arrivals):
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            llm.engine.add_request(f"{client}{number}", {"prompt_token_ids": [5] * length}, params, context={"client": client})
        ended = []
        while llm.engine.has_unfinished_requests():
            ended += [output.request_id[0] for output in llm.engine.step() if output.finished]
    return ended


def test_a_flood_delays_its_own_requests_first():
    arrivals = [("a", 8, 2)] * 6 + [("b", 8, 2)] * 2 + [("c", 8, 2)]
    assert "".join(served(arrivals)) == "abcabaaaa"
    assert "".join(served(arrivals, policy="fcfs")) == "aaaaaabbc"


def test_turns_count_by_tokens():
    assert "".join(served([("a", 30, 2)] * 4 + [("b", 6, 2)] * 8)) == "abbbbabbbbaa"


def test_one_client_is_served_by_arrival():
    assert served([("a", length, 2) for length in (9, 30, 4, 7)]) == ["a"] * 4
    policy = FairPolicy(SchedulerConfig())
    keys = [policy.key(request("a", tokens)) for tokens in (9, 30, 4)]
    assert keys == sorted(keys)


def test_nobody_saves_up_turns_or_starves():
    """Who comes late begins where the others are served, not before what waits for long."""
    policy = FairPolicy(SchedulerConfig())
    flood = [request("a", 10) for _ in range(100)]
    keys = [policy.key(one) for one in flood]
    for one, key in zip(flood, keys, strict=True):
        one.sort_key = (*key, 0.0)
    policy.begin_step([flood[49]], flood[50:])
    late = [policy.key(request("b", 10)) for _ in range(100)]
    assert late[0] == keys[49] and late[1] > keys[49]
    assert late[30] > keys[60], "the flood's next ones have their turns"


def test_clients_that_are_gone_are_forgotten():
    policy = FairPolicy(SchedulerConfig())
    for number in range(30_000):
        one = request(f"client {number}", 10)
        one.sort_key = policy.key(one)
        policy.begin_step([one], [])
        policy.key(request("busy", 10))
    assert len(policy._clocks) == 10_000 and "busy" in policy._clocks


def request(client: str, tokens: int) -> SimpleNamespace:
    params = SimpleNamespace(num_sequences=1)
    leader = SimpleNamespace(num_pending_tokens=tokens, num_computed_tokens=0)
    fields = {"num_prompt_tokens": tokens, "max_output_tokens": 0, "num_rows": 1, "chunkable": True, "search": None, "swapped": False}
    return SimpleNamespace(context={"client": client}, params=params, leader=leader, gave_way=False, **fields)


@pytest.mark.parametrize("n", [1, 3])
def test_sequences_count(n):
    policy, one = FairPolicy(SchedulerConfig()), request("a", 4)
    one.max_output_tokens, one.params.num_sequences = 10, n
    policy.key(one)
    assert policy.key(one) == (4 + 10 * n,)
