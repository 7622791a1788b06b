"""How many drafts the budget asks for: a larger configured maximum costs little."""

from __future__ import annotations

import random

import pytest
from test_draft_budget import requests
from toolkit_lm.messages import ScheduledSequence, StepPlan, StepResult
from toolkit_lm.scheduler.draft_budget import DraftBudget, DraftingFacts

STEPS = 300


def seconds_of(rows, drafts, passes):
    """A step of a machine whose steps with few tokens read the weights; `passes` [of a draft model,
    in steps]."""
    tokens = rows + drafts
    return 1.0 + 0.002 * tokens + max(0.0, 0.06 * (tokens - 12)) + passes


def gain(most, own, acceptance, num_rows, seed):
    """Tokens per second of a run, to those without drafts. `most`: configured maximum; `own`: a
    draft's pass, in plain steps."""
    table = [
        (rows, drafts, seconds_of(rows, rows * drafts, own * min(most, max(drafts, 1))))
        for rows in (1, 4, 16)
        for drafts in (0, 1, 3, 7)
    ]
    table += [(rows, -1, seconds_of(rows, 0, 0.0)) for rows in (1, 4, 16)]
    draws = random.Random(seed)
    budget = DraftBudget(DraftingFacts(table))
    running = requests(num_rows)
    rows = [request.unfinished[0] for request in running]
    time = tokens = 0.0
    for _ in range(STEPS):
        budget.begin_step(running)
        counts = [len(row.drafts) for row in rows]
        plan = StepPlan(
            scheduled=[
                ScheduledSequence(row.seq_id, 9, 1 + count, [], True, [], count)
                for row, count in zip(rows, counts, strict=True)
            ],
            asks_drafters=budget.is_asking,
        )
        drawn = []
        for row, count in zip(rows, counts, strict=True):
            accepted = 0
            while accepted < count and draws.random() < acceptance:
                accepted += 1
            drawn.append([7] * (1 + accepted))
            asked = budget.limits.get(row.seq_id, most) if plan.asks_drafters else 0
            row.drafts = [7] * min(most, asked)
        passes = own * max(len(row.drafts) for row in rows)
        took = seconds_of(num_rows, sum(counts), passes)
        budget.observe(plan, StepResult(token_ids=drawn), took * draws.lognormvariate(0, 0.03))
        time += took
        tokens += sum(map(len, drawn))
    return tokens / time * seconds_of(num_rows, 0, 0.0) / num_rows


@pytest.mark.parametrize("own", [0.02, 0.1, 0.2, 0.33])
@pytest.mark.parametrize("acceptance", [0.6, 0.8, 0.9, 1.0])
def test_a_larger_maximum_costs_little(own, acceptance):
    """A draft takes up to a third of a step, so that few of them pay."""
    found = {
        most: sum(gain(most, own, acceptance, 1, seed) for seed in range(5)) / 5
        for most in (1, 2, 4, 8, 16)
    }
    best = max(found, key=found.__getitem__)
    assert all(found[most] > 0.82 * found[best] for most in found if most > best), found
