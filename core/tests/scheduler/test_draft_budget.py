"""The budget of drafts: what it estimates, what it cuts, and that it does not lose."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import pytest
from toolkit_lm.messages import ScheduledSequence, StepPlan, StepResult
from toolkit_lm.scheduler.draft_budget import Acceptance, DraftBudget, DraftingFacts, StepTimes

MEMORY_BOUND = [(1, 0, 1.0), (1, 7, 1.15), (16, 0, 1.2), (16, 7, 3.0), (64, 0, 2.0), (64, 7, 9.0)]


class Row(SimpleNamespace):
    """A sequence whose drafts are accepted with a given probability each."""


def requests(num_rows):
    found = []
    for seq_id in range(num_rows):
        row = Row(seq_id=seq_id, drafts=[])
        row.request = SimpleNamespace(
            unfinished=[row], search=None, needs_tokens=True, seq_ids=[seq_id], max_asked=99
        )
        found.append(row.request)
    return found


def step(budget, running, accepts, seconds_of, *, num_drafts=4, forced=()):
    """One step: (seconds, tokens, drafts). Drafts of the next step follow if drafters were
    asked."""
    budget.begin_step(running)
    rows = [request.unfinished[0] for request in running]
    counts = [len(row.drafts) for row in rows]
    plan = StepPlan(
        scheduled=[
            ScheduledSequence(row.seq_id, 9, 1 + count, [], True, [], count)
            for row, count in zip(rows, counts, strict=True)
        ],
        asks_drafters=budget.is_asking,
    )
    seconds = seconds_of(len(rows), sum(counts), budget.is_asking)
    result = StepResult(token_ids=[], forced=list(forced))
    for row, scheduled in zip(rows, plan.scheduled, strict=True):
        accepted = 0
        while accepted < scheduled.num_drafts and accepts(row.seq_id):
            accepted += 1
        result.token_ids.append([7] * (1 + accepted))
        asked = min(num_drafts, budget.limits.get(row.seq_id, num_drafts))
        row.drafts = [7] * asked if plan.asks_drafters else []
        if row.seq_id in forced:
            row.drafts = [7] * num_drafts
    budget.observe(plan, result, seconds)
    return seconds, sum(map(len, result.token_ids)), sum(counts)


def cost(rows, drafts, asking, *, noise=0.0):
    """Of a machine whose steps with few tokens read the weights. Drafters take 2% of a step, and
    steps that are not planned ahead 1%."""
    tokens = rows + drafts
    seconds = 1.0 + 0.002 * tokens + max(0.0, 0.06 * (tokens - 12))
    return seconds * (1.03 if asking else 1.0) * random.lognormvariate(0, noise)


@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("points", [MEMORY_BOUND, []], ids=["measured", "unmeasured"])
def test_it_does_not_lose(num_rows, acceptance, points):
    random.seed(num_rows)
    budget = DraftBudget(DraftingFacts(points))
    running = requests(num_rows)
    total = [0.0, 0]
    for _ in range(600):
        seconds, tokens, _ = step(
            budget,
            running,
            lambda _: random.random() < acceptance,
            lambda *of: cost(*of, noise=0.03),
        )
        total = [total[0] + seconds, total[1] + tokens]
    plain = num_rows / cost(num_rows, 0, False)
    ratio = total[1] / total[0] / plain
    assert ratio >= 0.98
    if num_rows == 1 and acceptance >= 0.6:
        assert ratio > 1.6


def test_it_follows_a_text_that_changes():
    random.seed(1)
    budget = DraftBudget(DraftingFacts(MEMORY_BOUND))
    running = requests(1)
    rates = []
    for acceptance in (0.95, 0.0, 0.95):
        total = [0.0, 0]

        def accepts(_, acceptance=acceptance):
            return random.random() < acceptance

        for _ in range(2000):
            seconds, tokens, _ = step(budget, running, accepts, cost)
            total = [total[0] + seconds, total[1] + tokens]
        rates.append(total[1] / total[0])
    assert rates[0] > 2.5 and rates[1] > 0.97 and rates[2] > 2.0


def test_rows_that_are_accepted_keep_their_drafts_and_others_lose_them():
    budget = DraftBudget(DraftingFacts(MEMORY_BOUND))
    running = requests(16)

    def seconds_of(rows, drafts, asking):
        return 1.0 + 0.02 * (rows + drafts)

    for _ in range(60):
        step(budget, running, lambda seq_id: seq_id < 4, seconds_of)
    assert budget.is_asking
    budget.begin_step(running)
    counts = [budget.limits[seq_id] for seq_id in range(16)]
    assert min(counts[:4]) >= 2 and sum(counts[4:]) <= 4


def test_forced_drafts_are_kept_and_say_nothing_of_drafters():
    budget = DraftBudget(DraftingFacts(MEMORY_BOUND))
    running = requests(2)
    kept = [step(budget, running, lambda _: True, cost, forced=(0, 1))[2] for _ in range(20)]
    assert kept[1:] == [8] * 19
    assert budget.acceptance.chances()[0] == pytest.approx(0.6)


def test_steps_without_drafts_are_planned_ahead():
    budget = DraftBudget(DraftingFacts(MEMORY_BOUND))
    running = requests(4)
    found = []
    for _ in range(300):
        step(budget, running, lambda _: False, cost)
        found.append((budget.is_asking, running[0].needs_tokens))
    assert (False, False) in found and (True, True) in found
    assert sum(asking for asking, _ in found) < 60


def test_a_drafter_that_must_see_each_step_is_always_asked():
    budget = DraftBudget(DraftingFacts(MEMORY_BOUND, rests=False))
    running = requests(4)
    drafts = []
    for _ in range(60):
        drafts.append(step(budget, running, lambda _: False, cost)[2])
        assert budget.is_asking and running[0].needs_tokens
    assert sum(drafts[20:]) < 60, "of 640 that could be: what is never accepted is hardly verified"


def test_all_drafts_are_verified_where_no_budget_is_wanted():
    budget = DraftBudget(all_drafts=True)
    running = requests(3)
    drafts = [step(budget, running, lambda _: False, cost)[2] for _ in range(9)]
    assert drafts == [0] + [12] * 8 and running[0].needs_tokens


def test_times_are_interpolated_and_corrected():
    times = StepTimes([(1, 0, 1.0), (1, 4, 2.0), (4, 0, 2.0), (4, 4, 6.0)])
    assert times.predict(1, 2) == 1.5
    assert times.predict(2, 0) == pytest.approx(4 / 3)
    assert times.predict(4, 64) == pytest.approx(6.0 + 12 * 1.0)
    for _ in range(50):
        times.observe(1, 0, 3.0, plain=True)
    assert times.predict(1, 0, plain=True) == pytest.approx(3.0)
    # Those that have not run are corrected as their neighbours are.
    assert times.predict(1, 4) == pytest.approx(6.0)
    times.observe(1, 0, 300.0, plain=True)
    assert times.predict(1, 0, plain=True) < 3.2, "one step that was interrupted"


def test_gains_fall_along_a_draft():
    acceptance = Acceptance()
    for _ in range(30):
        acceptance.observe([(0, 4, 4), (1, 1, 0)])
    gains, of = acceptance.ranked([0, 1, 2], [4, 4, 4])
    assert gains.tolist() == sorted(gains, reverse=True)
    first = {row: float(gains[of == row][0]) for row in range(3)}
    assert first[1] < 0.2 and first[1] < first[2] < first[0] and first[0] > 0.85
    acceptance.age({1: 3})
    gains, of = acceptance.ranked([0, 2], [4, 4])
    assert gains[of == 0].tolist() == gains[of == 1].tolist()


def test_drafts_of_many_rows_are_ranked_as_those_of_each_alone():
    draws = random.Random(3)
    acceptance = Acceptance()
    for _ in range(40):
        right = [draws.randrange(6) for _ in range(7)]
        acceptance.observe([(row, min(5, n + 1), n) for row, n in enumerate(right)])
    most = [draws.randrange(1, 20) for _ in range(7)]
    gains, of = acceptance.ranked(list(range(7)), most)
    for row in range(7):
        alone, _ = acceptance.ranked([row], most[row : row + 1])
        assert gains[of == row].tolist() == alone.tolist()
        assert len(alone) <= min(most[row], 16)


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("acceptance", [0.0, 0.6])
def test_a_drafter_that_costs_more_than_a_step_does_not_lose(num_rows, acceptance):
    random.seed(num_rows)
    budget = DraftBudget(DraftingFacts(MEMORY_BOUND))
    running = requests(num_rows)

    def seconds_of(rows, drafts, asking):
        return cost(rows, drafts, asking, noise=0.03) * (2.5 if asking else 1.0)

    total = [0.0, 0]
    for _ in range(1000):
        seconds, tokens, _ = step(
            budget, running, lambda _: random.random() < acceptance, seconds_of
        )
        total = [total[0] + seconds, total[1] + tokens]
    assert total[1] / total[0] >= 0.97 * num_rows / cost(num_rows, 0, False)


def test_drafters_are_told_how_many_drafts_are_wanted():
    budget = DraftBudget(DraftingFacts(MEMORY_BOUND))
    running = requests(3)
    running[0].max_asked = 0
    running[1].search = "beams"
    for _ in range(20):
        step(budget, running, lambda _: True, cost, num_drafts=9)
    budget.begin_step(running)
    assert budget.is_asking
    assert budget.limits[0] == budget.limits[1] == 0 < budget.limits[2]


@pytest.mark.parametrize("options", [{}, {"all_drafts": True}])
def test_no_drafter_is_asked_for_requests_that_want_no_drafts(options):
    budget = DraftBudget(DraftingFacts(MEMORY_BOUND), **options)
    running = requests(2)
    for request in running:
        request.max_asked = 0
    asked = []
    for _ in range(20):
        step(budget, running, lambda _: True, cost)
        asked.append(budget.is_asking)
    assert not any(asked)


def test_one_step_that_took_long_does_not_make_plain_steps_seem_slow():
    """The first steps of a batch are few, and one of them may wait for something else."""
    budget = DraftBudget(DraftingFacts(MEMORY_BOUND))
    running = requests(64)
    slow = iter([4.0])
    drafts = [
        step(
            budget,
            running,
            lambda _: False,
            lambda *of: cost(*of) * (1.0 if of[2] else next(slow, 1.0)),
        )[2]
        for _ in range(60)
    ]
    assert sum(drafts) <= 24


def test_a_step_that_was_interrupted_when_it_was_measured_does_not_make_drafts_free():
    """A table that is kept says for good that drafts cost nothing, or more than they gain."""
    plain, asked, few, many = ((1, drafts) for drafts in (-1, 0, 1, 7))
    busy = StepTimes([(*plain, 3.0), (*asked, 2.0), (*few, 1.1), (*many, 1.5)])
    quiet = StepTimes([(*plain, 1.1), (*asked, 1.1), (*few, 1.1), (*many, 1.5)])
    for num_drafts in range(9):
        assert busy.predict(1, num_drafts) == quiet.predict(1, num_drafts)
    assert busy.predict(1, 0, plain=True) == quiet.predict(1, 0, plain=True)
    # So do fewer rows.
    assert StepTimes([(1, -1, 2.0), (4, -1, 1.0)]).predict(1, 0, plain=True) == 1.0


def test_drafts_that_were_not_measured_are_no_gift():
    """Measuring may end before any step with drafts: they cost what as many rows do, and where no
    step has asked a drafter, it takes as long as a step."""
    plain = [(1, -1, 1.0), (4, -1, 1.0), (16, -1, 1.2), (64, -1, 2.0)]
    times = StepTimes(plain)
    assert times.predict(64, 448) == pytest.approx(2 * (2.0 + 448 * 0.8 / 48))
    assert times.predict(1, 7) == pytest.approx(2 * (1.0 + 4 * 0.2 / 12))
    assert times.predict(16, 0) == pytest.approx(2.4)
    assert times.predict(16, 0, plain=True) == pytest.approx(1.2)
    asked = StepTimes([*plain, (64, 0, 2.4)])
    assert asked.predict(64, 448) / times.predict(64, 448) == pytest.approx(1.2 / 2)
    assert asked.predict(16, 0) == pytest.approx(1.2), "in whichever order rows were measured"


@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
@pytest.mark.parametrize("own", [1.0, 1.3, 3.0], ids=["cheap", "costly", "dear"])
def test_tries_take_less_than_a_hundredth_of_the_time(num_rows, own):
    """Nothing is ever accepted."""
    random.seed(num_rows)
    budget = DraftBudget(DraftingFacts())
    running = requests(num_rows)
    plain = cost(num_rows, 0, False)
    lost = 0.0
    for _ in range(2000):
        seconds, _, _ = step(
            budget,
            running,
            lambda _: False,
            lambda rows, drafts, asking: cost(rows, drafts, asking) * (own if asking else 1.0),
        )
        lost += seconds / plain - 1
    assert lost < 20


STEPS = {1: 240, 4: 200, 16: 96, 64: 40}
"""Steps of a cell of `benchmarks/speculation.py`, with a budget that knows nothing of the text."""


def table(own):
    """A machine's steps as a start measures them."""
    return [
        (rows, drafts, cost(rows, rows * max(drafts, 0), drafts >= 0) * (own if drafts >= 0 else 1))
        for rows in (1, 4, 16, 64)
        for drafts in (-1, 0, 1, 3, 7)
    ]


@pytest.mark.parametrize("num_rows", STEPS)
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("own", [1.0, 1.2, 2.0, 3.0], ids=["cheap", "costly", "dear", "dearest"])
@pytest.mark.parametrize("is_measured", [True, False], ids=["measured", "unmeasured"])
def test_a_short_run_does_not_lose_either(num_rows, acceptance, own, is_measured):
    """The mean of runs, whose steps are as long as they are by construction: noise is in what the
    budget sees."""
    random.seed(num_rows)
    ratios = []
    plain = num_rows / cost(num_rows, 0, False)

    def true_cost(rows, drafts, asking):
        return cost(rows, drafts, asking) * (own if asking else 1.0)

    for _ in range(10):
        budget = DraftBudget(DraftingFacts(table(own) if is_measured else []))
        running = requests(num_rows)
        total = [0.0, 0]

        def seconds_of(*of):
            taken = true_cost(*of)
            total[0] += taken  # noqa: B023
            return taken * random.lognormvariate(0, 0.03)

        for _ in range(STEPS[num_rows]):
            total[1] += step(budget, running, lambda _: random.random() < acceptance, seconds_of)[1]
        ratios.append(total[1] / total[0] / plain)
    assert sum(ratios) / len(ratios) >= 0.98
    if num_rows == 1 and acceptance >= 0.6 and own < 2:
        # Drafters that nobody has measured are tried after as many steps as pay for it.
        assert sum(ratios) / len(ratios) >= (1.6 if is_measured else 1.4) / own


@pytest.mark.parametrize("is_right", [True, False])
def test_what_a_drafter_has_missed_is_paid_and_does_not_end_a_try(is_right):
    """The first step of a try reads long prompts, and takes nine times as long."""
    budget = DraftBudget(DraftingFacts(table(1.0)))
    running = requests(1)
    begun = []

    def seconds_of(rows, drafts, asking):
        begins = asking and not budget._num_tried
        if begins:
            begun.append(rows)
        return cost(rows, drafts, asking) * (9 if begins else 1)

    drafts = 0
    for _ in range(1500):
        drafts += step(budget, running, lambda _: is_right, seconds_of)[2]
    if is_right:
        assert drafts > 3000
    else:
        assert drafts >= 2 and len(begun) <= 3, "the next try is later by what the first has cost"


def test_a_step_counts_few_calls_however_many_rows_it_has():
    """What the budget does in a step that asks drafters: arrays, and little for each row."""

    def calls(num_rows):
        budget = DraftBudget(DraftingFacts(MEMORY_BOUND))
        running = requests(num_rows)
        for _ in range(12):
            step(budget, running, lambda _: True, lambda *of: 1.0 + 0.001 * of[1])
        assert budget.is_asking
        count = 0

        def see(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(see)
        try:
            budget.begin_step(running)
        finally:
            sys.setprofile(None)
        return count

    assert calls(64) - calls(4) < 8 * 60
