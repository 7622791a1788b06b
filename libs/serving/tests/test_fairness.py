"""The scheduling policy "fair": turns between clients."""

from __future__ import annotations

from itertools import count
from random import Random
from types import SimpleNamespace

import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import SchedulerConfig
from toolkit_lm_devkit import SchedulingPolicyConformance
from toolkit_lm_serving.fairness import FairPolicy, StepCost


class TestFair(SchedulingPolicyConformance):
    policy = FairPolicy


def served(arrivals, *, policy="fair", **options) -> list[str]:
    """The clients of requests (client, prompt tokens, output tokens), in the order of their ends.
    One is served at a time."""
    with LLM("tiny", scheduling_policy=policy, max_num_seqs=1, **options) as llm:
        for number, (client, length, output) in enumerate(arrivals):
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            llm.engine.add_request(
                f"{client}{number}",
                {"prompt_token_ids": [5] * length},
                params,
                context={"client": client},
            )
        ended = []
        while llm.engine.has_unfinished_requests():
            ended += [output.request_id[0] for output in llm.engine.step() if output.finished]
    return ended


def test_a_flood_delays_its_own_requests_first():
    arrivals = [("a", 8, 2)] * 6 + [("b", 8, 2)] * 2 + [("c", 8, 2)]
    assert "".join(served(arrivals)) == "abcabaaaa"
    assert "".join(served(arrivals, policy="fcfs")) == "aaaaaabbc"


@pytest.mark.parametrize(("num_before", "num_kv_blocks"), [(20, 1000), (100, 1000), (20, 66)])
def test_what_a_client_has_no_place_for_is_in_nobodys_way(num_before, num_kv_blocks):
    """However much of it comes first, and where somebody must give way."""
    with LLM(
        "tiny",
        scheduling_policy="fair",
        max_num_seqs=128,
        num_kv_blocks=num_kv_blocks,
        block_size=16,
    ) as llm:

        def add(name: str, n: int, max_tokens: int) -> None:
            params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True)
            llm.engine.add_request(
                name, {"prompt_token_ids": [5, 6]}, params, context={"client": name[0]}
            )

        add("b0", 1, 40)
        # These cost it turns.
        for _ in range(10):
            add("b1", 64, 14)
            llm.engine.abort("b1")
        add("a0", 64, 12)
        for number in range(num_before):
            add(f"a1-{number}", 64, 1)
        add("b2", 1, 2)
        ended = []
        while not ended:
            ended = [output.request_id for output in llm.engine.step() if output.finished]
    assert ended == ["b2"]


def test_a_step_looks_at_the_first_of_each_client():
    """Of thousands that wait."""
    policy = FairPolicy(SchedulerConfig(max_num_seqs=64))
    runs, *flood = [request("a", 4) for _ in range(3000)]
    wide = request("b", 4)
    late = request("c", 4)
    runs.num_rows = 60
    wide.num_rows = 100
    runs.sort_key = (0.0,)
    for one in flood[:4]:
        one.num_rows = 5
    assert policy.begin_step([runs], [*flood, wide, late]) == [*flood[4:16], wide, late]


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


_numbers = count()


class Asked(SimpleNamespace):
    """As much of a request as the policy reads."""

    num_to_encode = 0

    @property
    def num_wanted_tokens(self) -> int:
        return self.num_to_encode + self.num_rows - 1 + self.leader.num_pending_tokens

    @property
    def least_tokens(self) -> int:
        return self.num_to_encode + 1 if self.chunkable else self.num_wanted_tokens


def request(client: str, tokens: int) -> Asked:
    params = SimpleNamespace(num_sequences=1)
    leader = SimpleNamespace(num_pending_tokens=tokens, num_computed_tokens=0)
    fields = {"num_prompt_tokens": tokens, "max_output_tokens": 0, "num_rows": 1, "chunkable": True}
    return Asked(
        context={"client": client},
        params=params,
        leader=leader,
        gave_way=False,
        number=next(_numbers),
        **fields,
    )


@pytest.mark.parametrize("n", [1, 3])
def test_sequences_count(n):
    policy = FairPolicy(SchedulerConfig())
    one = request("a", 4)
    one.max_output_tokens = 10
    one.params.num_sequences = n
    policy.key(one)
    assert policy.key(one) == (4 + 10 * n,)


def steps(*seen: tuple[int, float]) -> StepCost:
    cost = StepCost()
    for rows, seconds in seen:
        cost.observe(SimpleNamespace(scheduled=[0] * rows, num_tokens=rows), seconds)
    return cost


@pytest.mark.parametrize(
    ("seen", "rows"),
    [
        ([], 16),
        ([(1, 3.0)], 16),
        # 3 + rows / 4
        ([(1, 3.25), (64, 19.0)], 12),
        # Nothing but few rows, or nothing but many, says little.
        ([(4, 3.0), (7, 3.0)], 16),
        ([(64, 3.0), (200, 5.0)], 16),
        # More rows cost nothing, or all of it.
        ([(1, 3.0), (200, 3.0)], 2048),
        ([(1, 3.0), (200, 2.0)], 2048),
        ([(1, 1.0), (200, 200.0)], 4),
        # The cheapest count, and not for ever.
        ([(1, 3.25), (64, 19.0), (64, 30.0)], 12),
        ([(1, 3.25), (64, 1.0)] + [(64, 19.0)] * 200, 12),
        ([(1, 3.25), (64, 10.0)] + [(64, 19.0)] * 15, 12),
        ([(0, 0.0), (1, 3.25), (64, 19.0)], 12),
    ],
)
def test_rows_that_cost_as_much_as_a_step_itself(seen, rows):
    assert steps(*seen).num_tokens_of_base == pytest.approx(rows, abs=1)


def test_prefill_is_no_measure():
    cost = steps((1, 3.25), (64, 19.0))
    cost.observe(SimpleNamespace(scheduled=[0] * 2, num_tokens=500), 0.1)
    assert cost.num_tokens_of_base == 12


def planned(policy: FairPolicy, **wanted: list[int]) -> dict[str, int]:
    """Tokens by client, of a step that is shared by running requests that want so many tokens."""
    running = [request(client, 1) for client, each in wanted.items() for _ in each]
    for one, tokens in zip(
        running, [tokens for each in wanted.values() for tokens in each], strict=True
    ):
        one.leader = SimpleNamespace(num_pending_tokens=tokens, num_computed_tokens=1)
        one.sort_key = (0.0,)
    policy.begin_step(running, [])
    granted = dict.fromkeys(wanted, 0)
    for one in running:
        granted[one.context["client"]] += min(
            policy.grant(one, 2048), one.leader.num_pending_tokens
        )
    return granted


@pytest.mark.parametrize(
    ("wanted", "granted"),
    [
        ({"a": [1] * 200}, {"a": 200}),
        # 1.25 times what all would want that want as little as b, and a quarter of the 16 that cost
        # as much as a step itself.
        ({"a": [1] * 200, "b": [1]}, {"a": 5, "b": 1}),
        ({"a": [500, 500], "b": [1]}, {"a": 5, "b": 1}),
        ({"a": [1] * 200, "c": [1] * 100, "b": [1]}, {"a": 3, "b": 1, "c": 3}),
        ({"a": [1] * 10, "b": [1] * 12, "c": [1] * 9}, {"a": 10, "b": 12, "c": 9}),
        ({"a": [450], "b": [300]}, {"a": 450, "b": 300}),
        ({"a": [2000], "b": [300]}, {"a": 454, "b": 300}),
    ],
)
def test_a_step_is_shared(wanted, granted):
    assert planned(FairPolicy(SchedulerConfig()), **wanted) == granted


@pytest.mark.parametrize("encodes", [False, True])
def test_what_cannot_be_cut_saves_up(encodes):
    """A prompt of 100 tokens beside one that decodes: 5 tokens a step come to it, until they are as
    many as it has.

    An encoder's prompt cannot be cut, whatever the decoder's can.
    """
    policy = FairPolicy(SchedulerConfig())
    whole = request("a", 1 if encodes else 100)
    other = request("b", 1)
    whole.num_to_encode = 99 if encodes else 0
    whole.chunkable = encodes
    whole.sort_key = (0.0,)
    other.sort_key = (0.0,)
    other.leader.num_computed_tokens = 1
    granted = []
    for _ in range(21):
        policy.begin_step([other], [whole])
        assert policy.grant(other, 2048) == 1
        granted.append(policy.grant(whole, 2047))
    assert granted == [0] * 19 + [100, 0]


@pytest.mark.parametrize("num_decodes", [10, 60])
@pytest.mark.parametrize("waits", [True, False])
def test_what_needs_nearly_a_whole_step_does_not_starve(num_decodes, waits):
    """An image of 60 tokens, which cannot be cut, beside rows that decode for ever: where they
    leave too little, they leave room once."""
    policy = FairPolicy(SchedulerConfig(max_num_seqs=80))
    decodes = [request("a", 1) for _ in range(num_decodes)]
    whole = request("b", 60)
    for one in (*decodes, whole):
        one.sort_key = (0.0,)
    whole.chunkable = False
    whole.leader.num_computed_tokens = int(not waits)
    granted = []
    waited = 0
    while not granted or granted[-1] < 60:
        policy.begin_step(decodes if waits else [*decodes, whole], [whole] if waits else [])
        budget = 64
        computed = 0
        for one in decodes:
            tokens = min(policy.grant(one, budget), 1)
            budget -= tokens
            computed += tokens
        granted.append(min(policy.grant(whole, budget), 60) if budget else 0)
        granted[-1] *= granted[-1] == 60
        waited += 1
        assert waited < 40
        assert granted[-1] or computed, "somebody gets on"
    assert computed == 4, "the room beside it is used"
    policy.begin_step(decodes, [])
    assert sum(min(policy.grant(one, 64), 1) for one in decodes) == num_decodes


def test_steps_that_are_left_room_in_are_rare():
    """One that has no blocks, though it has room, does not slow the others much."""
    policy = FairPolicy(SchedulerConfig(max_num_seqs=80))
    decodes = [request("a", 1) for _ in range(60)]
    whole = request("b", 60)
    for one in (*decodes, whole):
        one.sort_key = (0.0,)
    whole.chunkable = False
    computed = []
    for _ in range(80):
        policy.begin_step(decodes, [whole])
        computed.append(
            sum(min(policy.grant(one, 64 - index), 1) for index, one in enumerate(decodes))
        )
        policy.grant(whole, 64 - computed[-1])
    assert 5 <= computed.count(4) <= 10
    assert set(computed) == {4, 60}


def test_a_client_leaves_places_free():
    policy = FairPolicy(SchedulerConfig(max_num_seqs=64))
    flood = [request("a", 1) for _ in range(100)]
    late = request("b", 1)
    for one in flood:
        one.sort_key = (0.0,)
    policy.begin_step([], flood)
    assert [policy.grant(one, 2048) > 0 for one in flood] == [True] * 62 + [False] * 38
    policy.begin_step(flood[:62], [flood[62], late])
    assert policy.grant(flood[62], 2048) == 0 and policy.grant(late, 2048) > 0
    assert policy.overtakes(late, flood[62]) and not policy.overtakes(flood[63], flood[62])


def test_who_runs_gets_on_though_its_client_leaves_no_place_free():
    """A wide request whose first sequence has ended may have computed nothing of the next."""
    policy = FairPolicy(SchedulerConfig(max_num_seqs=64))
    running = [request("a", 1) for _ in range(63)]
    for one in running:
        one.sort_key = (0.0,)
    policy.begin_step(running, [])
    assert all(policy.grant(one, 2048) for one in running)


def test_who_holds_most_gives_way_once():
    policy = FairPolicy(SchedulerConfig(max_num_seqs=4))
    running = [request("a", 1) for _ in range(3)] + [request("b", 1)]
    for one in running:
        one.sort_key = (0.0,)
    late = request("c", 1)
    policy.begin_step(running, [late])
    assert policy.gives_way(late, running) is running[2]
    assert policy.gives_way(request("a", 1), running) is None, "its own client holds most"
    running[2].gave_way = True
    assert policy.gives_way(late, running) is running[1]
    running[0].gave_way = running[1].gave_way = True
    assert policy.gives_way(late, running) is None
    # For blocks, who holds most gives way as often as it takes.
    assert policy.gives_way(running[0], running) is running[2]
    assert policy.gives_way(running[3], running[3:]) is running[3]


def flooded(max_tokens: int, **options) -> list[int]:
    """Steps that a small request of its own client takes, alone and then beside a flood."""
    with LLM("tiny", scheduling_policy="fair", **options) as llm:
        engine = llm.engine
        taken = []
        for flood in (0, 40):
            for number in range(flood):
                params = SamplingParams(max_tokens=200, ignore_eos=True)
                engine.add_request(
                    f"flood {number}",
                    {"prompt_token_ids": [5] * 20},
                    params,
                    context={"client": "a"},
                )
            for _ in range(8):
                engine.step()
            params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
            ended = False
            engine.add_request(
                f"small {flood}", {"prompt_token_ids": [5, 6, 7]}, params, context={"client": "b"}
            )
            taken.append(0)
            while not ended:
                ended = any(
                    output.request_id == f"small {flood}" and output.finished
                    for output in engine.step()
                )
                taken[-1] += 1
    return taken


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 8},
        {"max_num_seqs": 40, "kv_cache_memory": "1MiB"},
        {"preemption_mode": "swap", "max_num_seqs": 8, "swap_memory": "4MiB"},
    ],
)
def test_a_small_request_takes_as_many_steps_beside_a_flood(options):
    alone, beside = flooded(6, **options)
    assert beside <= alone + 1


@pytest.mark.parametrize("seed", range(4))
def test_whatever_two_clients_ask_for_ends(seed):
    """Wide, long, short and searching requests of two clients, beside each other, in too few places
    and blocks."""
    draws = Random(seed)
    with LLM(
        "tiny",
        scheduling_policy="fair",
        max_num_seqs=32,
        max_num_batched_tokens=64,
        max_model_len=128,
        num_kv_blocks=80,
    ) as llm:
        engine = llm.engine
        left = set()
        for number in range(24):
            n = draws.choice([1, 1, 2, 20, 32])
            beams = n in (2, 20) and draws.random() < 0.3
            params = SamplingParams(
                n=n, max_tokens=draws.choice([1, 2, 9]), ignore_eos=True, use_beam_search=beams
            )
            prompt = [5] * draws.choice([1, 1, 3, 40])
            engine.add_request(
                str(number),
                {"prompt_token_ids": prompt},
                params,
                context={"client": draws.choice("aab")},
            )
            left.add(str(number))
        for _ in range(3000):
            left -= {output.request_id for output in engine.step() if output.finished}
            if not left:
                break
    assert not left


def shares_of(policy: FairPolicy, running: list[Asked], num_steps: int) -> list[list[int]]:
    """Tokens granted to each running request, by step."""
    found = []
    for one in running:
        one.sort_key = (0.0,)
    for _ in range(num_steps):
        policy.begin_step(running, [])
        budget = 2048
        found.append([])
        for one in running:
            granted = min(policy.grant(one, budget), one.num_wanted_tokens)
            budget -= granted
            found[-1].append(granted)
    return found


def wide(client: str, num_rows: int) -> Asked:
    """A beam search: its rows are computed together."""
    found = request(client, 1)
    found.num_rows = num_rows
    found.chunkable = False
    return found


def test_what_cannot_be_cut_saves_up_beside_more_of_its_client():
    """The second beam search of a client takes nothing from the first one's savings."""
    running = [wide("a", 20), wide("a", 20), request("b", 1)]
    found = shares_of(FairPolicy(SchedulerConfig()), running, 8)
    assert found == [[0, 0, 1], [0, 0, 1], [0, 0, 1], [20, 0, 1]] * 2


@pytest.mark.parametrize("num_clients", [2, 3, 5])
def test_a_step_exceeds_its_bound_for_a_single_request(num_clients):
    """Each of several clients searches with 20 beams: no two searches are in the same step, all
    get on, and the client that wants least computes in every step."""
    clients = "acdef"[:num_clients]
    found = shares_of(
        FairPolicy(SchedulerConfig()),
        [*(wide(client, 20) for client in clients), request("b", 1)],
        200,
    )
    assert all(step[-1] == 1 for step in found)
    assert max(sum(step) for step in found) == 21
    computed = [sum(tokens) for tokens in zip(*found, strict=True)][:-1]
    assert min(computed) > 0 and max(computed) - min(computed) <= 20


def test_a_turn_passes_on_where_nothing_takes_it():
    """The client whose turn it is has ended its search."""
    policy = FairPolicy(SchedulerConfig())
    running = [wide(client, 20) for client in "acd"] + [request("b", 1)]
    while len(policy._late) < 2:
        shares_of(policy, running, 1)
    gone = next(iter(policy._late))
    left = [one for one in running if one.context["client"] != gone]
    left.append(request(gone, 1))
    found = shares_of(policy, left, 60)
    assert all(sum(step[at] for step in found) > 0 for at in range(len(left)))


def test_shares_of_less_than_a_token_add_up():
    """Forty clients in a step of 16 tokens: each computes in every third step or so, and the one
    that wants most is not the only one that does."""
    policy = FairPolicy(SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=64))
    running = [request(f"client {number}", 1 + 50 * (number == 0)) for number in range(40)]
    found = shares_of(policy, running, 50)
    computed = [sum(tokens) for tokens in zip(*found, strict=True)]
    assert max(computed) - min(computed) <= 1 and min(computed) >= 19
    assert max(map(sum, found)) <= 17


def test_a_step_of_too_few_tokens_is_shared():
    """Two clients that want as much as each other, in steps that the first could fill alone."""
    policy = FairPolicy(SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=64))
    running = [request("a", 1) for _ in range(64)] + [request("b", 1) for _ in range(64)]
    for step in shares_of(policy, running, 4):
        assert (sum(step[:64]), sum(step[64:])) == (32, 32)


BASE = 0.004
EACH = 0.001
"""Seconds of a simulated step, and of each of its rows."""


def timed(policy: FairPolicy, running: list[Asked], num_steps: int, each: float = EACH):
    """Tokens of each step, whose simulated time the policy observes."""
    sizes = []
    for _ in range(num_steps):
        [step] = shares_of(policy, running, 1)
        sizes.append(sum(step))
        rows = SimpleNamespace(scheduled=[0] * sizes[-1], num_tokens=sizes[-1])
        policy.observe(rows, BASE + each * sizes[-1])
    return sizes


def test_a_lone_client_has_all_of_a_step_without_a_target():
    flood = [request("a", 1) for _ in range(200)]
    assert timed(FairPolicy(SchedulerConfig()), flood, 20) == [200] * 20


@pytest.mark.parametrize("before", ["b", "ab"])
def test_steps_of_a_flood_are_short_while_another_client_is_expected_back(before):
    """A step's base costs as much as 4 rows, and steps have 16 times that in the second after the
    other was served."""
    policy = FairPolicy(SchedulerConfig())
    flood = [request("a", 1) for _ in range(200)]
    timed(policy, [request("a", 1)], 4)
    assert timed(policy, flood, 4) == [200] * 4, "nobody else was ever there"
    timed(policy, [request(client, 1) for client in before], 1)
    sizes = timed(policy, flood, 40)
    num_short = sizes.index(200)
    assert sizes == [64] * num_short + [200] * (40 - num_short)
    assert num_short == pytest.approx(1 / (BASE + EACH * 64), abs=1)


def test_prompts_of_a_flood_are_cut_while_another_client_is_expected_back():
    policy = FairPolicy(SchedulerConfig())
    timed(policy, [request("a", 1)], 4)
    timed(policy, [request("a", 1) for _ in range(200)], 4)
    assert planned(policy, a=[500]) == {"a": 500}
    planned(policy, a=[1], b=[1])
    assert planned(policy, a=[500]) == {"a": 256}


@pytest.mark.parametrize("clients", ["a", "ab"])
def test_steps_take_no_longer_than_the_target(clients):
    """24 rows take 28 ms. A flood alone, and beside another, begins with few rows, and soon
    computes as many as the time allows."""
    policy = FairPolicy(SchedulerConfig(step_time_target=0.028))
    timed(policy, [request("a", 1)], 4)
    flood = [request(clients[number % len(clients)], 1) for number in range(200)]
    sizes = timed(policy, flood, 400)
    assert max(sizes[:10]) <= 32, "until the times are known, steps grow twofold"
    assert max(sizes[10:]) <= 27 and min(sizes[10:]) >= 22


def test_the_target_is_kept_where_rows_become_dearer_and_cheaper():
    policy = FairPolicy(SchedulerConfig(step_time_target=0.028))
    flood = [request("a", 1) for _ in range(200)]
    timed(policy, [request("a", 1)], 4)
    timed(policy, flood, 100)
    assert timed(policy, flood, 200, 3 * EACH)[-1] <= 12
    assert timed(policy, flood, 3000)[-1] >= 20


def test_a_target_that_no_step_keeps_lets_single_rows_through():
    policy = FairPolicy(SchedulerConfig(step_time_target=0.001))
    flood = [request("a", 1) for _ in range(50)]
    sizes = timed(policy, flood, 50)
    assert sizes[-1] == 1 and min(sizes) == 1


def test_a_request_with_a_target_waits_for_a_bounded_step_beside_any_flood():
    """The rows of the step in flight when a small request comes, and of its own steps: 24 rows
    take as long as the target."""
    policy = FairPolicy(SchedulerConfig(step_time_target=0.028))
    timed(policy, [request("a", 1)], 4)
    flood = [request("a", 1) for _ in range(200)]
    in_flight = timed(policy, flood, 60)[-1]
    small = request("b", 1)
    own = shares_of(policy, [*flood, small], 8)
    assert in_flight <= 27 and max(map(sum, own)) <= 27
    assert [step[-1] for step in own] == [1] * 8, "it sits out no step"
