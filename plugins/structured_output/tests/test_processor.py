"""Limits of following a grammar, and the culprits of their errors."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.params import OF_THE_REQUEST
from toolkit_lm.sampling import ProcessorRow
from toolkit_lm_structured_output import processor
from toolkit_lm_structured_output.contract import GrammarCompiler, Matcher
from toolkit_lm_structured_output.processor import StructuredOutput

SIZE = 40


class Anything(Matcher):
    """Allows all tokens but the first. Reading one takes the clock on, by as much as the grammar
    says."""

    clock = 0.0
    filled: list[int] = []

    def __init__(self, seconds):
        self.seconds = seconds

    def copy(self):
        return Anything(self.seconds)

    def consume(self, token_id):
        Anything.clock += self.seconds
        if token_id == 0:
            raise ValueError("the grammar does not allow it.")

    def fill(self, mask):
        mask[:] = -1
        mask[0] = -2

    is_stopped = False


class AnyCompiler(GrammarCompiler):
    size = SIZE

    def compile(self, grammar):
        return Anything(float(grammar))

    def fill(self, matchers, masks):
        Anything.filled.append(len(matchers))
        Anything.clock += sum(matcher.seconds for matcher in matchers)
        super().fill(matchers, masks)


@pytest.fixture
def made(monkeypatch):
    module = ModuleType("any_compiler")
    module.AnyCompiler = AnyCompiler
    monkeypatch.setitem(sys.modules, "any_compiler", module)
    monkeypatch.setattr(processor.time, "thread_time", lambda: Anything.clock)
    Anything.filled.clear()
    return StructuredOutput(VllmConfig.default(), torch.device("cpu"))


def add(made, key, seconds):
    arguments = {
        "grammar": str(seconds),
        "compiler": "any_compiler:AnyCompiler",
        "tokenizer": "",
        "eos_token_ids": [0],
        "vocab_size": SIZE,
    }
    made.add(row(key), arguments, {})


def row(key, num_tokens=0, token=1):
    return ProcessorRow(key, np.array([7, *[token] * num_tokens], np.int32), 1, key)


def test_what_takes_ever_longer_fails_and_stays_failed(made):
    for key, seconds in enumerate((0.0, 0.009, 0.04)):
        add(made, key, seconds)
    for step in range(60):
        if step > 0:
            made.apply(torch.zeros(1, SIZE), [row(0, step)])
        if step in (10, 20, 59):
            made.apply(torch.zeros(1, SIZE), [row(1, step)])
    reads = 0
    with pytest.raises(
        RequestError,
        match=f"^{OF_THE_REQUEST} ask for a structure that is too complex: following 8 tokens "
        "took 0\\.6",
    ):
        for reads in range(20):
            made.apply(torch.zeros(1, SIZE), [row(2, reads)])
    with pytest.raises(RequestError, match="following 8 tokens"):
        made.apply(torch.zeros(1, SIZE), [row(2, reads)])


def test_what_does_not_follow_fails_and_stays_failed(made):
    add(made, 0, 0.0)
    values = torch.zeros(1, SIZE)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"too complex: the grammar does not allow it$"):
            made.apply(values, [row(0, 1, token=0)])
    assert not values.any(), "atomic: nothing has changed"


def test_the_mask_of_what_is_slow_is_made_alone(made):
    for key, seconds in enumerate((0.0, 0.003, 0.0)):
        add(made, key, seconds)
    for num_tokens in range(2):
        values = torch.zeros(3, SIZE)
        made.apply(values, [row(key, num_tokens) for key in range(3)])
        assert (values[:, 0] == -torch.inf).all() and not values[:, 1:].any()
    assert Anything.filled == [3, 2, 1]
