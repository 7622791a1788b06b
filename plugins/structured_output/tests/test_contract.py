"""A third party's backend: the example of the hook's page."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from toolkit_lm.errors import RequestError
from toolkit_lm_structured_output.contract import DEAD_END, Source
from toolkit_lm_structured_output.wishes import Wish

PAGE = Path(__file__).parents[3] / "docs" / "hooks" / "toolkit_register_structured_output.md"


@pytest.fixture(scope="module")
def example():
    found = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1:]:
        exec(block, found)
    return SimpleNamespace(**found)


@pytest.fixture
def compiler(example):
    return example.MyCompiler(Source("", (0,)))


def wish(kind, value):
    return Wish("structured_outputs", kind, value)


def test_toolkit_register_structured_output(example):
    reader = example.MyReader(Source("", (0,)), None)
    assert reader.read(wish("choice", ["A", "B", "A"])).grammar == "A\nB"
    for kind, value in (("regex", "a"), ("choice", []), ("choice", ["a" * 300_000])):
        with pytest.raises(RequestError, match="structured_outputs"):
            reader.read(wish(kind, value))


def test_the_example_matches(compiler):
    matcher = compiler.compile("12\n1?")
    mask = np.zeros(2, np.int32)
    other = matcher.copy()
    matcher.consume(ord("1") - 32)
    matcher.fill(mask)
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [
        ord("2") - 32,
        ord("?") - 32,
    ]
    with pytest.raises(ValueError, match="no choice continues with"):
        matcher.consume(ord("3") - 32)
    other.consume(ord("1") - 32)
    other.consume(ord("?") - 32)
    assert other.is_stopped and not matcher.is_stopped and other.forced() == []


def test_what_can_be_compiled_is_tried(compiler):
    assert compiler.error_of("12\n1?", None) == ""
    assert compiler.error_of("abc", None) == "nothing matches it"
    assert compiler.error_of("12a", None) == DEAD_END
