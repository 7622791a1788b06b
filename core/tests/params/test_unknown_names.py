"""Parameters of another name are refused with the nearest."""

from __future__ import annotations

import pytest
from toolkit_lm import PoolingParams, SamplingParams


@pytest.mark.parametrize(
    ("params", "wrong", "right"),
    [(SamplingParams, "temprature", "temperature"), (PoolingParams, "dimension", "dimensions")],
)
def test_an_unknown_parameter_is_refused_with_the_nearest(params, wrong, right):
    expected = rf"{params.__name__} has no parameter '{wrong}'\. Did you mean '{right}'"
    with pytest.raises(TypeError, match=expected):
        params(**{wrong: 1})


def test_a_positional_argument_is_refused_as_before():
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)
