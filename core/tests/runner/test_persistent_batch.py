"""PersistentBatch: sequences join, grow and leave, and a step's flat inputs are made of what is left."""

from __future__ import annotations

import numpy as np
import pytest
from fake_model import new, row
from toolkit_lm.messages import BlockMove, NewSequence, ScheduledSequence, StepPlan
from toolkit_lm.params import SamplingParams
from toolkit_lm.runner import PersistentBatch


@pytest.fixture
def batch():
    return PersistentBatch(3, 16, [4])


def run(batch: PersistentBatch, plan: StepPlan):
    batch.apply(plan)
    return batch.inputs(plan)


def test_the_flat_inputs_of_prompts(batch):
    plan = StepPlan(
        new=[new(7, [10, 11, 12, 13, 14], [5, 2]), new(8, [20, 21, 22], [3], num_computed_tokens=1)],
        scheduled=[row(7, 5), row(8, 1, samples=False)],
    )
    inputs = run(batch, plan)
    assert inputs.input_ids.tolist() == [10, 11, 12, 13, 14, 21]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 1]
    assert inputs.query_start.tolist() == [0, 5, 6]
    assert inputs.seq_lens.tolist() == [5, 2]
    assert [slots.tolist() for slots in inputs.slot_mappings] == [[20, 21, 22, 23, 8, 13]]
    assert inputs.block_tables[0][0].tolist() == [5, 2] and inputs.block_tables[0][1, 0] == 3
    assert inputs.sampling.tolist() == [0]
    assert inputs.rows.tolist() == [batch.row_of[7], batch.row_of[8]]


def test_a_drawn_token_is_the_next_step_s_input(batch):
    first = run(batch, StepPlan(new=[new(7, [1, 2, 3, 4], [6])], scheduled=[row(7, 4)]))
    batch.append_tokens(first.rows, [9])
    second = run(batch, StepPlan(scheduled=[row(7, 1, [1])]))
    assert (second.input_ids.tolist(), second.positions.tolist(), second.seq_lens.tolist()) == ([9], [4], [5])
    assert second.slot_mappings[0].tolist() == [4]
    assert batch.sampling.position[second.rows].tolist() == [1]


def test_the_blocks_of_a_new_sequence_are_in_its_tables_already(batch):
    """A plan names them twice; they count once."""
    inputs = run(batch, StepPlan(new=[new(7, [1, 2, 3, 4, 5], [6, 2])], scheduled=[row(7, 5, [6, 2])]))
    batch.append_tokens(inputs.rows, [9])
    batch.apply(StepPlan(scheduled=[row(7, 4, [3])]))
    inputs = batch.inputs(StepPlan(scheduled=[row(7, 4)]))
    assert inputs.block_tables[0].tolist() == [[6, 2, 3]]


def test_a_move_replaces_an_entry_of_the_table(batch):
    run(batch, StepPlan(new=[new(7, [1, 2, 3, 4, 5], [6, 2])], scheduled=[row(7, 4, samples=False)]))
    inputs = run(batch, StepPlan(scheduled=[row(7, 1)], moves=[BlockMove(7, 0, 1, 8)]))
    assert inputs.block_tables[0].tolist() == [[6, 8]]
    assert inputs.slot_mappings[0].tolist() == [8 * 4]


def test_rows_are_given_again(batch):
    batch.apply(StepPlan(new=[new(i, [i, 1], [i]) for i in range(3)]))
    assert sorted(batch.row_of.values()) == [0, 1, 2]
    freed = batch.row_of[1]
    inputs = run(batch, StepPlan(dropped=[1], new=[new(9, [4, 4, 4], [7])], scheduled=[row(9, 3)]))
    assert batch.row_of == {0: batch.row_of[0], 2: batch.row_of[2], 9: freed}
    # Nothing is left of the one before.
    assert (inputs.input_ids.tolist(), inputs.block_tables[0].tolist()) == ([4, 4, 4], [[7]])


def test_dropping_what_never_came_is_no_error(batch):
    batch.apply(StepPlan(dropped=[42]))
    assert batch.row_of == {}


def test_groups_have_tables_of_their_own():
    batch = PersistentBatch(2, 16, [4, 2])
    seq = NewSequence(
        seq_id=0,
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_tables=[[5], [1, 3]],
        params=SamplingParams(),
        seed=0,
        stop_token_ids=[],
    )
    inputs = run(batch, StepPlan(new=[seq], scheduled=[ScheduledSequence(0, 3, [[5], [1, 3]], True)]))
    assert [slots.tolist() for slots in inputs.slot_mappings] == [[20, 21, 22], [2, 3, 6]]
    assert [table.tolist() for table in inputs.block_tables] == [[[5]], [[1, 3]]]


def test_only_those_that_ask_register_with_logits_processors():
    class Table:
        def __init__(self):
            self.calls = []

        def add(self, seq):
            self.calls.append(("add", seq.seq_id))

        def remove(self, key):
            self.calls.append(("remove", key))

    table = Table()
    batch = PersistentBatch(2, 16, [4], table)
    asking = new(5, [1], [0], params=SamplingParams(logits_processors={"some": {}}))
    batch.apply(StepPlan(new=[new(4, [1], [1]), asking]))
    batch.apply(StepPlan(dropped=[4, 5], new=[new(6, [1], [0])]))
    batch.apply(StepPlan(dropped=[6]))
    assert table.calls == [("add", 5), ("remove", 5)]
    assert not batch.sampling.processed.any()


def test_prompt_logprobs_that_were_returned_are_remembered(batch):
    batch.apply(StepPlan(new=[new(7, [1, 2, 3], [0], num_prompt_logprobs=2)]))
    assert batch.num_prompt_logprobs[batch.row_of[7]] == 2
    assert np.array_equal(batch.history.tokens(batch.row_of[7]), [1, 2, 3])
