"""The dispatcher: each step has a graph that its attention backend allows, of a size that it fits
in."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from toolkit_lm.attention import BatchLimits, GraphSupport
from toolkit_lm_compile.dispatch import NO_GRAPH, Dispatcher, Kind, Mode, Run, default_sizes, settle

FULL_MODES = (Mode.FULL, Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE)


@st.composite
def dispatchers(draw):
    num_rows = draw(st.integers(1, 24))
    limits = BatchLimits(num_rows, draw(st.integers(num_rows, 96)), 128)
    sizes = sorted(draw(st.sets(st.integers(1, limits.num_tokens), max_size=8)))
    support = draw(st.sampled_from(GraphSupport))
    mode, _ = settle(draw(st.sampled_from(Mode)), {"other": GraphSupport.ALWAYS, "one": support})
    return Dispatcher(mode, support, sizes, limits, draw(st.integers(1, 4)))


@st.composite
def steps(draw):
    """A dispatcher, and the lengths of the rows of a step that its engine may plan."""
    dispatcher = draw(dispatchers())
    num_rows = draw(st.integers(1, dispatcher.limits.num_rows))
    most = dispatcher.limits.num_tokens // num_rows
    lengths = draw(
        st.one_of(
            st.integers(1, most).map(lambda one: [one] * num_rows),
            st.lists(st.integers(1, most), min_size=1, max_size=num_rows),
        )
    )
    return dispatcher, lengths, draw(st.booleans())


def dispatch(dispatcher, lengths, whole=True):
    return dispatcher.dispatch(len(lengths), sum(lengths), max(lengths), whole=whole)


@given(steps())
def test_each_step_has_a_graph_that_its_backend_allows_and_that_it_fits_in(step):
    dispatcher, lengths, whole = step
    run = dispatch(dispatcher, lengths, whole)
    if run.kind is Kind.NONE:
        assert run == NO_GRAPH, "a step without a graph is not padded"
        return
    assert run in dispatcher.graphs(), "only what was captured is replayed"
    assert sum(lengths) <= run.num_tokens <= dispatcher.limits.num_tokens
    if run.kind is Kind.PIECEWISE:
        assert dispatcher.mode in (Mode.PIECEWISE, Mode.FULL_AND_PIECEWISE)
        return
    assert whole and dispatcher.mode in FULL_MODES and dispatcher.support is not GraphSupport.NEVER
    assert (
        len(lengths) <= run.num_rows <= dispatcher.limits.num_rows
        and max(lengths) <= run.max_query_len
    )
    padding = run.num_tokens - sum(lengths)
    assert padding <= (run.num_rows - len(lengths)) * run.max_query_len, (
        "each token of padding has a row of padding"
    )
    if dispatcher.support is not GraphSupport.ALWAYS or dispatcher.mode is not Mode.FULL:
        assert (
            set(lengths) == {run.max_query_len}
            and run.num_rows * run.max_query_len == run.num_tokens
        )
        assert run.max_query_len == 1 or dispatcher.support >= GraphSupport.UNIFORM


@given(steps())
def test_a_graph_is_the_smallest_that_fits(step):
    dispatcher, lengths, whole = step
    run = dispatch(dispatcher, lengths, whole)
    alike = [
        one
        for one in dispatcher.graphs()
        if one.kind is run.kind and one.num_tokens >= sum(lengths)
    ]
    if run.kind is Kind.PIECEWISE:
        assert run.num_tokens == min(one.num_tokens for one in alike)
    elif run.kind is Kind.FULL and run.max_query_len * run.num_rows == run.num_tokens:
        assert run.num_tokens == min(
            one.num_tokens for one in alike if one.max_query_len == run.max_query_len
        )


@given(steps())
def test_no_step_beyond_the_largest_size_is_padded(step):
    dispatcher, lengths, whole = step
    if not dispatcher.sizes or sum(lengths) > -(-dispatcher.sizes[-1] // max(lengths)) * max(
        lengths
    ):
        assert dispatch(dispatcher, lengths, whole) == NO_GRAPH


@given(steps())
def test_a_step_goes_without_a_graph_for_a_reason_alone(step):
    dispatcher, lengths, whole = step
    if dispatch(dispatcher, lengths, whole).kind is not Kind.NONE or not dispatcher.sizes:
        return
    if dispatcher.mode in (Mode.PIECEWISE, Mode.FULL_AND_PIECEWISE):
        assert sum(lengths) > dispatcher.sizes[-1]
    elif dispatcher.mode in FULL_MODES and whole and set(lengths) == {1}:
        assert len(lengths) > max(dispatcher.uniform_sizes(1), default=0)


@given(dispatchers())
def test_graphs_are_captured_once_the_largest_first(dispatcher):
    graphs = dispatcher.graphs()
    assert len(set(graphs)) == len(graphs)
    assert [one.num_tokens for one in graphs] == sorted(
        (one.num_tokens for one in graphs), reverse=True
    )
    assert (dispatcher.mode is Mode.NONE or not dispatcher.sizes) == (
        not graphs
    ) or dispatcher.mode in FULL_MODES


@pytest.mark.parametrize(
    ("asked", "support", "settled"),
    [
        (Mode.NONE, GraphSupport.ALWAYS, Mode.NONE),
        (Mode.PIECEWISE, GraphSupport.NEVER, Mode.PIECEWISE),
        (Mode.FULL, GraphSupport.ALWAYS, Mode.FULL),
        (Mode.FULL, GraphSupport.UNIFORM, Mode.FULL_AND_PIECEWISE),
        (Mode.FULL, GraphSupport.DECODE, Mode.FULL_AND_PIECEWISE),
        (Mode.FULL, GraphSupport.NEVER, Mode.PIECEWISE),
        (Mode.FULL_DECODE_ONLY, GraphSupport.DECODE, Mode.FULL_DECODE_ONLY),
        (Mode.FULL_DECODE_ONLY, GraphSupport.NEVER, Mode.PIECEWISE),
        (Mode.FULL_AND_PIECEWISE, GraphSupport.DECODE, Mode.FULL_AND_PIECEWISE),
        (Mode.FULL_AND_PIECEWISE, GraphSupport.NEVER, Mode.PIECEWISE),
    ],
)
def test_a_mode_that_a_backend_cannot_do_is_another_and_the_reason_names_the_backend(
    asked, support, settled
):
    mode, reason = settle(asked, {"able": GraphSupport.ALWAYS, "culprit": support})
    assert mode is settled
    assert reason is None if mode is asked else "'culprit'" in reason


def test_a_model_without_a_cache_has_its_parts_alone():
    assert settle(Mode.FULL, {})[0] is Mode.PIECEWISE


def test_the_kinds_of_steps_of_an_engine():
    dispatcher = Dispatcher(
        Mode.FULL_AND_PIECEWISE,
        GraphSupport.UNIFORM,
        [1, 2, 4, 8, 16],
        BatchLimits(8, 64, 128),
        query_len=3,
    )
    assert dispatch(dispatcher, [1] * 3) == Run(Kind.FULL, 4, 4, 1)
    assert dispatch(dispatcher, [1] * 3, whole=False) == Run(Kind.PIECEWISE, 4)
    assert dispatch(dispatcher, [3] * 3) == Run(Kind.FULL, 9, 3, 3)
    assert dispatch(dispatcher, [2] * 3) == Run(Kind.PIECEWISE, 8), "neither one token nor three"
    assert dispatch(dispatcher, [5, 1, 1]) == Run(Kind.PIECEWISE, 8)
    assert dispatch(dispatcher, [17]) == NO_GRAPH


@pytest.mark.parametrize(
    ("limits", "first", "last", "count"),
    [
        (BatchLimits(256, 8192, 4096), [1, 2, 4, 8, 16, 24], 512, 51),
        (BatchLimits(32, 2048, 512), [1, 2, 4, 8], 64, 11),
        (BatchLimits(1, 2, 16), [1, 2], 2, 2),
    ],
)
def test_the_default_sizes_end_with_the_rows_of_a_step(limits, first, last, count):
    sizes = default_sizes(limits)
    assert sizes[: len(first)] == first and sizes[-1] == last and len(sizes) == count
