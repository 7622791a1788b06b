"""The chain: whose drafts a row takes, by what was accepted of each drafter at each place."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from toolkit_lm.messages import ScheduledSequence, StepPlan, StepResult
from toolkit_lm.parts.draft_chain import DraftChain

STATED = {"steady": [0.6, 0.6, 0.6], "boaster": [0.9, 0.9, 0.9]}
OFFERS = {"steady": [1, 2, 3], "boaster": [5, 6, 7]}


class Stub:
    def __init__(self, name):
        self.name = name

    def acceptance(self, seq_id, drafts):
        return STATED[self.name][: len(drafts)]

    def extend(self, seq_id, token_ids, num_drafts):
        return []


def ask(name, call):
    return call(Stub(name))


INPUTS = SimpleNamespace(
    sampling=[0],
    rows=[0],
    plan=SimpleNamespace(scheduled=[SimpleNamespace(seq_id=4)]),
    histories=SimpleNamespace(tokens=lambda row: np.array([9], np.int32)),
)


def choose(chain):
    [drafts] = chain.choose(INPUTS, {name: {4: one} for name, one in OFFERS.items()}, ask).values()
    return next(name for name, own in OFFERS.items() if own == drafts)


def verify(chain, name, drawn):
    """A step that verifies a drafter's drafts, and draws these tokens."""
    drafts = OFFERS[name]
    chain.choose(INPUTS, {name: {4: drafts}}, ask)
    row = ScheduledSequence(4, 0, 4, [], True, [9, *drafts], 3)
    result = StepResult(token_ids=[drawn])
    chain.observe(StepPlan(scheduled=[row]), result)
    return result.drafters[4]


@pytest.fixture
def chain():
    return DraftChain(100)


def test_a_boast_is_found_out(chain):
    assert choose(chain) == "boaster"
    for _ in range(12):
        assert verify(chain, "boaster", [0]) == [("boaster", 3, 0)]
    assert choose(chain) == "steady"


def test_first_drafts_are_not_blamed_for_later_ones(chain):
    """All of its first ones were right: it is still the best where one draft counts."""
    for _ in range(30):
        verify(chain, "boaster", [5, 0])
        verify(chain, "steady", [1, 2, 0])
    gain = chain._gain
    pieces = {name: SimpleNamespace(drafter=name, stated=STATED[name][:1]) for name in STATED}
    assert gain(pieces["boaster"]) > 0.9 and gain(pieces["boaster"]) >= gain(pieces["steady"])
    whole = {name: SimpleNamespace(drafter=name, stated=STATED[name]) for name in STATED}
    assert gain(whole["boaster"]) < 1.5 < gain(whole["steady"])
    assert choose(chain) == "steady"


def test_places_go_on_in_an_extension(chain):
    """A drafter that only extends is judged where its drafts stand."""
    chain.choose(INPUTS, {"steady": {4: [1]}}, ask)
    [piece] = chain._pending[4]
    chain._pending[4] = [piece, piece._replace(drafter="boaster", tokens=[6], stated=[0.9])]
    row = ScheduledSequence(4, 0, 3, [], True, [9, 1, 6], 2)
    chain.observe(StepPlan(scheduled=[row]), StepResult(token_ids=[[1, 0]]))
    assert set(chain._records) == {("steady", 0), ("boaster", 1)}
