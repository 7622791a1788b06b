"""Columns of a SamplingBatch, each of them by its declaration."""

import numpy as np
import pytest
from toolkit_lm.messages import NewSequence, SequenceInputs
from toolkit_lm.param_spec import spec_of
from toolkit_lm.params import SAMPLING_PARAMS, SamplingParams
from toolkit_lm.sampling import SamplingBatch, TokenHistory
from toolkit_lm.sampling.batch import COLUMNS, PARAMETERS

NUM_ROWS = 3
SEQUENCE = NewSequence(
    seq_id=7,
    token_ids=[5, 6, 7],
    num_prompt_tokens=2,
    block_tables=[[0]],
    params=SamplingParams(
        temperature=0.5,
        top_p=0.25,
        min_p=0.125,
        top_k=3,
        repetition_penalty=1.5,
        presence_penalty=0.75,
        frequency_penalty=-0.5,
        min_tokens=2,
        logprobs=4,
        prompt_logprobs=2,
        logprob_token_ids=[1],
    ),
    seed=11,
    stop_token_ids=[9],
    inputs=SequenceInputs(forced_tokens={0: 5}),
    num_candidates=6,
)


@pytest.fixture
def batch():
    history = TokenHistory(NUM_ROWS, 8)
    history.set(1, SEQUENCE.token_ids, SEQUENCE.num_prompt_tokens)
    batch = SamplingBatch(history)
    batch.set(1, SEQUENCE)
    return batch


def test_each_number_that_a_draw_reads_is_a_column():
    drawn = {
        name
        for name, option in SAMPLING_PARAMS.items()
        if option.kinds == (float,) and spec_of(option).use == "draws"
    }
    assert set(PARAMETERS) == drawn


@pytest.mark.parametrize("name", COLUMNS)
def test_a_row_is_selected_and_cleared_in_each_column(batch, name):
    column = getattr(batch, name)
    if name not in ("row", "follows", "num_drafts", "steps"):
        assert column[1] != column[0], "the sequence sets no value that is not the default"
    selected = getattr(batch.select(np.array([1, 0])), name)
    assert selected.dtype == column.dtype
    assert selected.tolist() == [column[1], column[0]]
    batch.clear(1)
    assert column.tolist() == getattr(SamplingBatch(batch.history), name).tolist()


def test_a_selection_has_the_processors_of_its_batch(batch):
    batch.processors = object()
    batch.select(np.array([1])).processors = None
    assert batch.select(np.array([1])).processors is batch.processors


def test_positions_of_a_row_have_its_drafts_as_if_they_were_drawn(batch):
    history = batch.history
    tokens = history.tokens(1).tolist()
    history.put(1, len(tokens), [7, 8], num_drafts=2)
    selected = batch.select(np.array([1, 1, 1]), np.arange(3))
    assert selected.position.tolist() == [int(batch.position[1]) + i for i in range(3)]
    for i in range(3):
        row = selected.processor_row(i)
        assert (row.token_ids.tolist(), row.num_drafts) == (tokens + [7, 8][:i], i)
        assert selected.output(i).tolist() == (tokens + [7, 8][:i])[row.num_prompt_tokens :]
    # More positions than the batch has rows, and selections of a selection.
    many = batch.select(np.ones(20, np.int64), np.arange(20) % 3)
    again = many.select(np.array([19, 0]))
    assert again.num_drafts.tolist() == [1, 0] and len(many) == 20
    assert again.position.tolist() == [int(batch.position[1]) + 1, int(batch.position[1])]
    assert not batch.num_drafts.any() and history.tokens(1).tolist() == tokens
