"""`benchmarks/kv_agents.py`: what it calls reusable is what earlier turns have computed."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from itertools import takewhile
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return importlib.import_module("kv_agents").turns


def common(first, second):
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )


def test_a_turn_reuses_whole_blocks_of_earlier_ones(turns):
    """All but the answers' last, drawn tokens, which the script makes up."""
    given = list(turns(Namespace(sessions=3, turns=3)))
    assert len(given) == 9
    for number, (prompt, reusable) in enumerate(given):
        shared = max((common(prompt, other) for other, _ in given[:number]), default=0)
        assert reusable == shared // 16 * 16
