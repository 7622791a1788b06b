"""Beam searches among other requests, through EngineCore: aborts, failures and tiny pools; results
are those of a search alone."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from fake_engine import NAN, POISON, FakeCore, FakeRunner, check_blocks, kv_cache, next_token
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import Candidates, EngineRequest, StepPlan, StepResult
from toolkit_lm.params import SamplingParams
from toolkit_lm.scheduler import Request
from toolkit_lm.scheduler.beam import Beam, Hypothesis
from toolkit_lm.scheduler.rules import RequestRules

MAX_MODEL_LEN = 20
GROUPS = [
    [(1, None)],
    [(4, None)],
    [(3, None)],
    [(4, None), (2, None)],
    [(2, 5)],
    [(2, None), (2, 4)],
]
"""KV groups: block size and window."""


def candidates(tokens: list[int], count: int) -> Candidates:
    """The likeliest next tokens: a function of the whole prefix. Now and then one that makes its
    row, or its step, fail."""
    rng = random.Random(hash(tuple(tokens)))
    ids = rng.sample(range(NAN), min(count, NAN))
    if rng.random() < 0.02:
        ids[rng.randrange(2)] = rng.choice([NAN, POISON])
    return Candidates(ids, sorted((-rng.expovariate(1.0) for _ in ids), reverse=True))


class BeamRunner(FakeRunner):
    def _draw(self, plan: StepPlan, inputs) -> StepResult:
        result = StepResult(token_ids=[])
        wanted = self.batch.sampling.num_candidates[inputs.rows].tolist()
        for r, scheduled in enumerate(plan.scheduled):
            tokens = self.tokens[scheduled.seq_id]
            drawn = []
            if NAN in inputs.input_ids[inputs.query_start[r] : inputs.query_start[r + 1]]:
                result.errors[scheduled.seq_id] = "not a number"
            if scheduled.samples and wanted[r]:
                result.candidates[scheduled.seq_id] = candidates(tokens, wanted[r])
            elif scheduled.samples:
                drawn = [next_token(tokens)]
            result.token_ids.append(drawn)
            tokens += drawn
        drew = [i for i in inputs.sampling if not wanted[i]]
        self.batch.append_tokens(inputs.rows[drew], [result.token_ids[i][0] for i in drew])
        return result


def make_core(
    groups=((4, None),), num_blocks=80, host_blocks=0, max_in_flight=1, **options
) -> FakeCore:
    config = VllmConfig.default(max_model_len=MAX_MODEL_LEN, **options)
    cache = kv_cache(num_blocks, list(groups), host_blocks)
    core = FakeCore(config, cache, max_in_flight)
    core.executor.runner = BeamRunner(config, cache)
    # Measured times would not let "auto" choose the same each time.
    core.scheduler.preemption.observe = lambda num_tokens, seconds: None
    core.scheduler.preemption._seconds_per_token = (
        core.scheduler.blocks.config.pools[0].block_bytes / 4e9
    )
    return core


def message(
    request_id: str,
    prompt: list[int],
    arrival_time: float = 0.0,
    eos: tuple[int, ...] = (),
    **params,
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        eos_token_ids=list(eos),
        arrival_time=arrival_time,
    )


def found_alone(request: EngineRequest) -> list[Hypothesis] | None:
    """Results of a search that runs alone; None if one of its beams fails."""
    prompt = request.prompt_token_ids
    request.max_output_tokens = min(
        request.params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - len(prompt)
    )
    search = Request(request, iter(range(9)), RequestRules()).search
    beams = [Beam([], 0.0)]
    while beams:
        if any({NAN, POISON} & {*prompt, *beam.token_ids} for beam in beams):
            return None
        extensions = search.advance(
            beams, [candidates([*prompt, *beam.token_ids], search.num_candidates) for beam in beams]
        )
        beams = [Beam([*beams[e.parent].token_ids, e.token_id], e.logprob) for e in extensions]
    return search.hypotheses[: request.params.n]


def drain(core: FakeCore) -> dict[str, list]:
    outputs: dict[str, list] = {}
    for _ in range(2000):
        for output in core.step().outputs if core.has_unfinished else ():
            outputs.setdefault(output.request_id, []).append(output)
    assert not core.has_unfinished, "requests never end"
    return outputs


def assert_nothing_is_left(core: FakeCore) -> None:
    blocks = core.scheduler.blocks
    runner = core.executor.runner
    assert (blocks.num_used, blocks.num_used_on_host) == (0, 0)
    assert not core.scheduler.roster.sequences
    if core._in_flight:
        # The last step failed, and nobody has asked for its results.
        core._reset_after_failure()
    runner.batch.apply(core.scheduler.drop_plan())
    assert not runner.batch.row_of, "the runner holds a sequence that has ended"


def random_core(rng: random.Random) -> FakeCore:
    max_num_seqs = rng.randint(3, 10)
    budget = rng.randint(0, 20)
    groups = rng.choice(GROUPS)
    [one_sequence] = kv_cache(0, groups).max_blocks(MAX_MODEL_LEN, max_num_seqs + budget)
    return make_core(
        groups,
        num_blocks=2 * one_sequence + rng.randint(0, 12),
        host_blocks=rng.choice([0, 2, 8, 80]),
        max_in_flight=rng.choice([1, 2, 3]),
        pipeline_parallel_size=rng.choice([1, 2]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + budget,
        enable_prefix_caching=rng.random() < 0.6,
        preemption_mode=rng.choice(["recompute", "swap", "auto"]),
    )


def random_message(rng: random.Random, number: int) -> EngineRequest:
    prompt = [7 * i % NAN for i in range(rng.randint(0, 6))] + [
        rng.randrange(NAN) for _ in range(rng.randint(1, 6))
    ]
    params = {"n": rng.randint(1, 3), "max_tokens": rng.choice([None, 1, 5, 9])}
    if rng.random() < 0.7:
        params |= {
            "use_beam_search": True,
            "beam_width": rng.randint(max(2, params["n"]), 4),
            "length_penalty": rng.choice([-1, 0, 1, 2]),
        }
        params |= {"early_stopping": rng.choice([True, False, "never"])}
    elif rng.random() < 0.5:
        params["best_of"] = params["n"] + 1
    eos = tuple(rng.sample(range(NAN), rng.choice([0, 2, 15])))
    return message(f"r{number}", prompt, float(number), eos, **params)


@pytest.mark.parametrize("seed", range(60))
def test_searches_among_others(seed):
    rng = random.Random(seed)
    core = random_core(rng)
    messages: dict[str, EngineRequest] = {}
    outputs: dict[str, list] = {}
    aborted = set()
    for step in range(400):
        if step < 120 and rng.random() < 0.3:
            request = random_message(rng, len(messages))
            with suppress(RequestError):
                core.add_request(request)
                messages[request.request_id] = request
                outputs[request.request_id] = []
        if rng.random() < 0.02 and (live := sorted(core.scheduler.roster.requests)):
            request_id = rng.choice(live)
            core.finish(request_id, "abort")
            aborted.add(request_id)
        if rng.random() < 0.02 and not core.scheduler.quarantine.quarantined:
            core.executor.transient = rng.choice(["before", "after"])
        if core.has_unfinished:
            for output in core.step().outputs:
                outputs[output.request_id].append(output)
        check_blocks(core.scheduler.blocks)
        assert core.scheduler.roster.num_running <= core.scheduler.max_num_seqs
        assert all(
            len(plan.scheduled) <= core.scheduler.max_num_seqs for plan in core.executor.plans[-2:]
        )
    for request_id, rest in drain(core).items():
        outputs[request_id] += rest
    assert_nothing_is_left(core)
    searches = {
        i: one for i, one in messages.items() if one.params.use_beam_search and i not in aborted
    }
    assert len(searches) > 5
    for request_id, request in searches.items():
        assert_found(outputs[request_id], found_alone(request), request.params.n)
    for request_id, request in messages.items():
        if request_id not in searches and request_id not in aborted:
            assert {o.index for o in outputs[request_id] if o.finish_reason} == set(
                range(request.params.num_sequences)
            )


def assert_found(outputs: list, expected: list[Hypothesis] | None, n: int) -> None:
    assert [o.index for o in outputs] == list(range(n)), "all at once, one for each"
    if all("a hiccup" in (o.error or "") for o in outputs):
        # It was alone in a step that failed for no reason of its own.
        return
    if expected is None:
        assert all(o.finish_reason == "error" and o.error for o in outputs)
    else:
        assert [(o.token_ids, o.finish_reason) for o in outputs] == [
            (one.token_ids, one.finish_reason) for one in expected
        ]
        assert [o.score for o in outputs] == pytest.approx([one.score for one in expected])
        assert [o.cumulative_logprob for o in outputs] == pytest.approx(
            [one.logprob for one in expected]
        )


def test_the_prompt_is_computed_once_and_shared():
    core = make_core(max_num_batched_tokens=512)
    request = message("a", list(range(11)), use_beam_search=True, n=2, beam_width=4, max_tokens=6)
    core.add_request(request)
    most_used = 0
    while core.has_unfinished:
        core.step()
        most_used = max(most_used, core.scheduler.blocks.num_used)
    assert found_alone(request) is not None
    # The prompt, and a token for each of four beams after the first five tokens of the output.
    assert core.executor.runner.num_computed == 11 + 5 * 4
    # Two full blocks of the prompt for all, and two blocks for each beam.
    assert most_used <= 2 + 4 * 2
    assert_nothing_is_left(core)


def test_beams_advance_together_or_not_at_all():
    core = make_core(max_num_seqs=8, max_num_batched_tokens=8)
    core.add_request(message("search", [1], use_beam_search=True, n=4, max_tokens=9))
    core.step()
    # It is served first: four of its tokens beside the first beams, then six, and two that are left
    # are not enough for four beams.
    core.add_request(message("first", list(range(10)), arrival_time=-1.0, max_tokens=2))
    drain(core)
    rows = [[row.num_tokens for row in plan.scheduled] for plan in core.executor.plans[1:5]]
    assert rows == [[1, 1, 1, 1, 4], [6], [1, 1, 1, 1, 1], [1, 1, 1, 1]]


def test_the_next_step_of_a_search_waits_for_its_results():
    core = make_core(max_in_flight=2)
    core.add_request(message("search", [1, 2, 3], use_beam_search=True, n=2, max_tokens=4))
    core.add_request(message("other", [4, 5], max_tokens=9))
    core._launch()
    assert [len(plan.scheduled) for plan in core.executor.plans] == [2, 1]


@pytest.mark.parametrize("reason", ["abort", "timeout"])
def test_it_ends_as_a_whole(clock, reason):
    core = make_core()
    request = message("a", [1, 2, 3], use_beam_search=True, n=2, beam_width=3, max_tokens=9)
    request.deadline = clock.now + 10
    core.add_request(request)
    core.step()
    core.step()
    assert core.scheduler.blocks.num_used
    if reason == "abort":
        core.finish("a", "abort", index=1)
        assert not core.has_unfinished
        news = core.poll_outputs()
    else:
        clock.now += 11
        news = core.step()
        assert [(o.index, o.finish_reason) for o in news.outputs] == [
            (0, "timeout"),
            (1, "timeout"),
        ]
    [event] = [e for e in news.events if getattr(e, "kind", None) == "aborted"]
    assert (event.num_sequences, event.finish_reason) == (2, reason)
    assert_nothing_is_left(core)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_between_the_candidates_of_its_beams(mode):
    core = make_core(preemption_mode=mode, host_blocks=40)
    request = message("a", [1, 2, 3, 4, 5], use_beam_search=True, n=3, max_tokens=9)
    core.add_request(request)
    for _ in range(3):
        core.step()
    scheduler = core.scheduler
    scheduler.preemption.mode = "recompute"
    scheduler._preempt(StepPlan(), scheduler.roster.requests["a"])
    core.step()
    # The first has computed the prompt for all, and its own tokens; the others will follow.
    assert [beam.candidates is not None for beam in scheduler.roster.requests["a"].sequences] == [
        True,
        False,
        False,
    ]
    scheduler.preemption.mode = mode
    plan = scheduler.drop_plan()
    scheduler._preempt(plan, scheduler.roster.requests["a"])
    assert bool(plan.swap_out) == (mode == "swap")
    core.executor.execute(plan)
    assert_found(drain(core)["a"], found_alone(request), 3)
    assert_nothing_is_left(core)


def test_a_search_leaves_quarantine_when_all_its_beams_have_their_candidates(caplog):
    core = make_core()
    requests = [
        message(name, prompt, use_beam_search=True, n=3, max_tokens=9)
        for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5, 6]))
    ]
    for request in requests:
        core.add_request(request)
    core.step()
    core.step()
    core.executor.transient = "before"
    core.step()
    alone = []
    while core.scheduler.quarantine.quarantined:
        alone.append(core.scheduler.quarantine.quarantined[0])
        core.step()
    # One step for the prompt and the first beam, one for the other two.
    assert alone == ["a", "a", "b", "b"]
    outputs = drain(core)
    for request in requests:
        assert_found(outputs[request.request_id], found_alone(request), 3)


def test_later_requests_find_what_beams_have_computed():
    core = make_core([(1, None)], num_blocks=200, enable_prefix_caching=True)
    request = message("a", [1, 2, 3], use_beam_search=True, n=3, max_tokens=9)
    core.add_request(request)
    drain(core)
    for number, one in enumerate(found_alone(request)):
        # All but the last token, which was never computed.
        core.add_request(message(f"b{number}", [1, 2, 3, *one.token_ids], max_tokens=1))
        assert [o.num_cached_tokens for o in drain(core)[f"b{number}"]] == [3 + 8]


def test_results_that_come_after_a_preemption_are_not_taken():
    core = make_core(max_in_flight=2, preemption_mode="recompute", enable_prefix_caching=True)
    request = message("a", [1, 2, 3, 4, 5], use_beam_search=True, n=3, max_tokens=9)
    core.add_request(request)
    core.step()
    core._launch()
    core.scheduler._preempt(StepPlan(), core.scheduler.roster.requests["a"])
    assert_found(drain(core)["a"], found_alone(request), 3)
    assert_nothing_is_left(core)
