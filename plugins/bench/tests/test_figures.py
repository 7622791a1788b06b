"""The arithmetic of figures, with exact numbers."""

from __future__ import annotations

import numpy as np
import pytest
from toolkit_lm_bench.figures import Sample, make_figures, percentile


@pytest.mark.parametrize(
    ("number", "value"), [(0, 1.0), (25, 2.0), (50, 3.0), (90, 8.2), (99, 10.72), (100, 11.0)]
)
def test_percentiles_are_interpolated(number, value):
    ordered = [1.0, 2.0, 3.0, 4.0, 11.0]
    assert (
        percentile(ordered, number)
        == pytest.approx(value)
        == pytest.approx(np.percentile(ordered, number))
    )


def test_of_one_value_each_percentile_is_that_value():
    assert [percentile([7.0], number) for number in (0, 50, 100)] == [7.0] * 3


def test_the_figures_of_a_run():
    samples = [
        Sample(
            ttft=0.1, gaps=[0.02, 0.03, 0.01], e2el=0.16, num_prompt_tokens=10, num_output_tokens=4
        ),
        # Two tokens came in one event.
        Sample(ttft=0.3, gaps=[0.1], e2el=0.4, num_prompt_tokens=20, num_output_tokens=3),
        Sample(ttft=0.2, e2el=0.2, num_prompt_tokens=30, num_output_tokens=1, is_counted=True),
        Sample(error="500: out of luck"),
    ]
    figures = make_figures(samples, 2.0, [50, 99.9], {"ttft": 250, "tpot": 30})
    row = figures.as_json()
    assert (row["completed"], row["failed"], row["counted"], row["first_error"]) == (
        3,
        1,
        1,
        "500: out of luck",
    )
    assert (row["total_input_tokens"], row["total_output_tokens"]) == (60, 8)
    assert (row["request_throughput"], row["output_throughput"], row["total_token_throughput"]) == (
        1.5,
        4.0,
        34.0,
    )
    # The second is too late; the third has no time per output token.
    assert row["request_goodput"] == 1.0
    assert row["mean_ttft_ms"] == pytest.approx(200) and row["p50_ttft_ms"] == pytest.approx(200)
    assert row["std_ttft_ms"] == pytest.approx(np.std([100, 200, 300]))
    assert row["mean_tpot_ms"] == pytest.approx((20 + 50) / 2)
    assert row["p50_itl_ms"] == pytest.approx(25) and row["mean_itl_ms"] == pytest.approx(40)
    assert row["p99.9_e2el_ms"] == pytest.approx(np.percentile([160, 200, 400], 99.9))


def test_the_acceptance_of_drafts():
    """A step gives its accepted drafts and one token more."""
    samples = [
        Sample(
            num_output_tokens=7,
            num_draft_tokens=6,
            num_accepted_tokens=3,
            drafters={"mtp": (4, 3), "ngram": (2, 0)},
        ),
        Sample(
            num_output_tokens=3, num_draft_tokens=2, num_accepted_tokens=1, drafters={"mtp": (2, 1)}
        ),
    ]
    row = make_figures(samples, 1.0, [50], {}).as_json()
    assert (row["draft_acceptance"], row["acceptance_length"]) == (0.5, 10 / 6)
    assert row["drafters"] == {"mtp": 4 / 6, "ngram": 0}
    row = make_figures([Sample(num_output_tokens=7)], 1.0, [50], {}).as_json()
    assert (row["draft_acceptance"], row["acceptance_length"]) == (None, None)


@pytest.mark.parametrize(
    ("slo", "is_met"),
    [
        ({}, True),
        ({"ttft": 100}, True),
        ({"ttft": 99}, False),
        ({"tpot": 20, "e2el": 160}, True),
        ({"ttft": 100, "e2el": 159}, False),
    ],
)
def test_an_slo_is_met_when_no_metric_is_over_its_bound(slo, is_met):
    assert Sample(ttft=0.1, e2el=0.16, num_output_tokens=4).meets(slo) is is_met


def test_without_an_answer_there_are_no_times():
    figures = make_figures([Sample(error="no")], 1.0, [50], {"ttft": 1})
    assert (figures.distributions, figures.request_goodput, figures.output_throughput) == (
        {},
        0.0,
        0.0,
    )
    assert make_figures([], 1.0, [50], {}).request_goodput is None
