"""PersistentBatch: sequences join, grow and leave, and a step's flat inputs are made of what is
left."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from fake_model import new, row
from toolkit_lm.attention import BatchLimits
from toolkit_lm.kv import FullSpec
from toolkit_lm.messages import BlockMove, NewSequence, ScheduledSequence, SequenceInputs, StepPlan
from toolkit_lm.model import GraphShape
from toolkit_lm.params import SamplingParams
from toolkit_lm.runner import PersistentBatch, StepBuffers


def make_batch(
    num_rows: int, block_sizes: list[int], processors=None, device: str = "cpu"
) -> PersistentBatch:
    specs = [
        FullSpec(block_size=size, num_kv_heads=1, head_size=1, dtype="float32")
        for size in block_sizes
    ]
    buffers = StepBuffers(
        BatchLimits(num_rows, 16, 16), [spec.num_blocks(16) for spec in specs], torch.device(device)
    )
    return PersistentBatch(buffers, specs, 16, processors)


@pytest.fixture
def batch():
    return make_batch(3, [4])


def run(batch: PersistentBatch, plan: StepPlan):
    batch.apply(plan)
    return batch.inputs(plan)


def test_the_flat_inputs_of_prompts(batch):
    plan = StepPlan(
        new=[new(7, [10, 11, 12, 13, 14], [5, 2]), new(8, [20, 21, 22], [3])],
        scheduled=[row(7, 5), row(8, 1, samples=False, start=1)],
    )
    inputs = run(batch, plan)
    assert inputs.input_ids.tolist() == [10, 11, 12, 13, 14, 21]
    assert inputs.token_index.tolist() == [0, 1, 2, 3, 4, 1]
    assert inputs.query_start.tolist() == [0, 5, 6]
    assert inputs.groups[0].seq_lens.tolist() == [5, 2]
    assert [group.slots.tolist() for group in inputs.groups] == [[20, 21, 22, 23, 8, 13]]
    assert inputs.groups[0].table[0].tolist() == [5, 2] and inputs.groups[0].table[1, 0] == 3
    assert inputs.sampling.tolist() == [0]
    assert inputs.rows.tolist() == [batch.row_of[7], batch.row_of[8]]


def test_a_drawn_token_is_the_next_step_s_input(batch):
    first = run(batch, StepPlan(new=[new(7, [1, 2, 3, 4], [6])], scheduled=[row(7, 4)]))
    batch.append_tokens(first.rows, [9])
    second = run(batch, StepPlan(scheduled=[row(7, 1, [1], start=4)]))
    assert (
        second.input_ids.tolist(),
        second.token_index.tolist(),
        second.groups[0].seq_lens.tolist(),
    ) == ([9], [4], [5])
    assert second.groups[0].slots.tolist() == [4]
    assert batch.sampling.position[second.rows].tolist() == [1]


def test_the_blocks_of_a_new_sequence_are_in_its_tables_already(batch):
    """A plan names them twice; they count once."""
    inputs = run(
        batch, StepPlan(new=[new(7, [1, 2, 3, 4, 5], [6, 2])], scheduled=[row(7, 5, [6, 2])])
    )
    batch.append_tokens(inputs.rows, [9])
    batch.apply(StepPlan(scheduled=[row(7, 4, [3], start=5)]))
    inputs = batch.inputs(StepPlan(scheduled=[row(7, 4, start=5)]))
    assert inputs.groups[0].table.tolist() == [[6, 2, 3]]


def test_a_move_replaces_an_entry_of_the_table(batch):
    run(
        batch, StepPlan(new=[new(7, [1, 2, 3, 4, 5], [6, 2])], scheduled=[row(7, 4, samples=False)])
    )
    inputs = run(batch, StepPlan(scheduled=[row(7, 1, start=4)], moves=[BlockMove(7, 0, 1, 8)]))
    assert inputs.groups[0].table.tolist() == [[6, 8]]
    assert inputs.groups[0].slots.tolist() == [8 * 4]


def test_rows_are_given_again(batch):
    batch.apply(StepPlan(new=[new(i, [i, 1], [i]) for i in range(3)]))
    assert sorted(batch.row_of.values()) == [0, 1, 2]
    freed = batch.row_of[1]
    inputs = run(batch, StepPlan(dropped=[1], new=[new(9, [4, 4, 4], [7])], scheduled=[row(9, 3)]))
    assert batch.row_of == {0: batch.row_of[0], 2: batch.row_of[2], 9: freed}
    # Nothing is left of the one before.
    assert (inputs.input_ids.tolist(), inputs.groups[0].table.tolist()) == ([4, 4, 4], [[7]])


def test_dropping_what_never_came_is_no_error(batch):
    batch.apply(StepPlan(dropped=[42]))
    assert batch.row_of == {}


def test_groups_have_tables_of_their_own():
    batch = make_batch(2, [4, 2])
    seq = NewSequence(
        seq_id=0,
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        block_tables=[[5], [1, 3]],
        params=SamplingParams(),
        seed=0,
        stop_token_ids=[],
    )
    inputs = run(
        batch, StepPlan(new=[seq], scheduled=[ScheduledSequence(0, 0, 3, [[5], [1, 3]], True)])
    )
    assert [group.slots.tolist() for group in inputs.groups] == [[20, 21, 22], [2, 3, 6]]
    assert [group.table.tolist() for group in inputs.groups] == [[[5]], [[1, 3]]]


def test_only_those_that_ask_register_with_logits_processors():
    class Table:
        def __init__(self):
            self.calls = []
            self.names = {}

        def add(self, row, seq):
            self.calls.append(("add", seq.seq_id, row.token_ids.tolist()))
            self.names[row.key] = ["some"]
            return {"logits"}

        def steps(self, key):
            return True

        def remove(self, key):
            self.calls.append(("remove", key))
            del self.names[key]

    table = Table()
    batch = make_batch(2, [4], table)
    asking = new(5, [1], [0], inputs=SequenceInputs(logits_processors={"some": {}}))
    batch.apply(StepPlan(new=[new(4, [1], [1]), asking]))
    batch.apply(StepPlan(dropped=[4, 5], new=[new(6, [1], [0])]))
    batch.apply(StepPlan(dropped=[6]))
    assert table.calls == [("add", 5, [1]), ("remove", 5)]
    assert not batch.sampling.edited.any()


def test_prompt_logprobs_that_were_returned_are_remembered(batch):
    batch.apply(StepPlan(new=[new(7, [1, 2, 3], [0], num_prompt_logprobs=2)]))
    assert batch.num_prompt_logprobs[batch.row_of[7]] == 2
    assert np.array_equal(batch.history.tokens(batch.row_of[7]), [1, 2, 3])


def test_a_step_s_inputs_are_where_those_of_the_step_before_were(batch):
    first = run(batch, StepPlan(new=[new(7, [1, 2, 3, 4], [6])], scheduled=[row(7, 4)]))
    batch.append_tokens(first.rows, [9])
    second = run(batch, StepPlan(scheduled=[row(7, 1, [1], start=4)]))
    for name in ("input_ids", "token_index", "query_start"):
        assert getattr(first, name).ctypes.data == getattr(second, name).ctypes.data
    for name in ("seq_lens", "slots", "table"):
        assert (
            getattr(first.groups[0], name).ctypes.data
            == getattr(second.groups[0], name).ctypes.data
        )


@pytest.mark.parametrize(
    ("shape", "query_start"),
    [(GraphShape(4, 8, 2), [0, 2, 4, 6, 8]), (GraphShape(4, 9, 9), [0, 2, 4, 9, 9])],
    ids=["rows alike", "rows of any length"],
)
def test_a_padded_step_has_rows_without_keys_and_tokens_without_slots(shape, query_start):
    batch = make_batch(4, [4])
    # Values that a larger step has left there do not count.
    run(
        batch,
        StepPlan(
            new=[new(i, [1, 2, 3], [i]) for i in range(4)], scheduled=[row(i, 3) for i in range(4)]
        ),
    )
    inputs = run(
        batch,
        StepPlan(
            dropped=[0, 1, 2, 3],
            new=[new(i, [4, 5], [i]) for i in (5, 6)],
            scheduled=[row(5, 2), row(6, 2)],
        ),
    )
    slots = inputs.groups[0].slots.tolist()
    *_, [plain] = batch.buffers.upload(inputs, None)
    assert (plain.num_rows, plain.num_tokens, plain.is_fixed, plain.has_padding) == (
        2,
        4,
        False,
        False,
    )
    *_, [view] = batch.buffers.upload(inputs, shape)
    assert view.query_start.tolist() == view.query_start_device.tolist() == query_start
    assert view.seq_lens.tolist() == view.seq_lens_device.tolist() == [2, 2, 0, 0]
    assert view.slot_mapping.tolist() == slots + [-1] * (shape.num_tokens - 4)
    assert view.starts.tolist() == [0] * 4 and view.has_padding and view.is_fixed
    assert view.block_table.shape == (4, batch.buffers.groups[0].table.host.shape[1]), (
        "tables do not change their shape"
    )
    assert (view.max_query_len, view.max_seq_len) == (
        shape.max_query_len,
        batch.buffers.limits.max_model_len,
    )
    assert (
        view.slot_mapping.data_ptr() == plain.slot_mapping.data_ptr()
        and view.block_table.data_ptr() == plain.block_table.data_ptr()
    )


def test_steps_that_nobody_waits_for_have_their_own_inputs():
    """A prompt in six chunks, on a device that has done nothing of it when the host makes the last
    one ready."""
    with FakeCuda() as cuda:
        batch = make_batch(3, [4], device="cuda")
        seen = []
        plan = StepPlan(
            new=[new(7, list(range(10, 22)), [5, 2, 8])], scheduled=[row(7, 2, samples=False)]
        )
        for chunk in range(6):
            inputs = run(batch, plan)
            input_ids, positions, [view] = batch.buffers.upload(inputs, None)
            given = (
                input_ids,
                positions,
                view.slot_mapping,
                view.seq_lens_device,
                view.query_start_device,
                view.block_table,
            )
            # Tensors that kernels would read; nobody waits for them.
            seen.append([one.clone() for one in given])
            plan = StepPlan(scheduled=[row(7, 2, samples=False, start=2 * chunk + 2)])
        waits = set(cuda.waits)
        slots = [block * 4 + place for block in (5, 2, 8) for place in range(4)]
        for chunk, step in enumerate(seen):
            first = 2 * chunk
            end = 2 * chunk + 2
            expected = [
                [10 + first, 11 + first],
                [first, first + 1],
                slots[first:end],
                [end],
                [0, 2],
                [[5, 2, 8][: chunk // 2 + 1]],
            ]
            assert [one.tolist() for one in step] == expected, f"chunk {chunk}"
        assert waits == {"event"}


def test_a_block_table_is_uploaded_where_it_has_changed():
    """Whole rows, which torch copies at once; each step's tokens, positions and lengths are always
    new."""
    with FakeCuda() as cuda:
        batch = make_batch(3, [4], device="cuda")
        tables = []

        def step(plan: StepPlan, shape: GraphShape | None = None) -> int:
            """How many tables were copied."""
            inputs = run(batch, plan)
            cuda.uploads.clear()
            *_, [view] = batch.buffers.upload(inputs, shape)
            batch.append_tokens(inputs.rows, [1] * len(inputs.rows))
            tables.append(view.block_table.clone())
            copied = [tuple(size) for size in cuda.uploads if len(size) == 2]
            assert len(cuda.uploads) - len(copied) == 5 and all(
                size == (view.num_rows, 4) for size in copied
            )
            return len(copied)

        first = StepPlan(
            new=[new(i, [1, 2, 3], [i]) for i in (5, 6)], scheduled=[row(5, 3), row(6, 3)]
        )
        assert step(first) == 1
        assert step(StepPlan(scheduled=[row(5, 1, start=3), row(6, 1, start=3)])) == 0
        assert step(StepPlan(scheduled=[row(5, 1, [9], start=4), row(6, 1, [8], start=4)])) == 1
        decode = StepPlan(scheduled=[row(5, 1, start=5), row(6, 1, start=5)])
        run(batch, StepPlan(scheduled=[row(6, 1, start=5)]))
        # That step has failed before it came to the device.
        assert step(decode) == 1
        assert step(decode, GraphShape(3, 3, 1)) == 0
        assert step(StepPlan(scheduled=[row(6, 1, start=6)])) == 1
        assert step(StepPlan(scheduled=[row(6, 1, start=7)], moves=[BlockMove(6, 0, 0, 2)])) == 1
        assert step(StepPlan(dropped=[6], scheduled=[row(5, 1, start=6)])) == 1
        padded = [[5, 9, 0, 0], [6, 8, 0, 0], [0] * 4]
        expected = [
            [[5], [6]],
            [[5], [6]],
            *[[[5, 9], [6, 8]]] * 2,
            padded,
            [[6, 8]],
            [[2, 8]],
            [[5, 9]],
        ]
        assert [one.tolist() for one in tables] == expected
        assert set(cuda.waits) <= {"event", "aten::_to_copy"}
