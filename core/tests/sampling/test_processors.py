"""Logits processors that plugins bring: rows, order, errors."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import Plugins, PluginWarning, hookimpl
from toolkit_lm.sampling import LogitsProcessor, ProcessorTable, sample


class Only(LogitsProcessor):
    """Leaves one token, which each sequence's arguments name. Raises as asked."""

    argmax_invariant = False

    def __init__(self, config, device):
        super().__init__(config, device)
        self.tokens = {}
        self.raising = set()

    @classmethod
    def check(cls, arguments):
        pass

    def add(self, key, arguments, prompt_token_ids):
        assert prompt_token_ids == [key + 1]
        if arguments.get("raise") == "add":
            raise KeyError("no such word")
        if arguments.get("raise"):
            self.raising.add((key, arguments["raise"]))
        self.tokens[key] = arguments["token"]

    def remove(self, key):
        if (key, "remove") in self.raising:
            raise RuntimeError("cannot leave")
        self.tokens.pop(key, None)

    def apply(self, logits, rows):
        assert logits.shape == (len(rows), 64) and logits.dtype == torch.float32
        for i, row in enumerate(rows):
            assert row.num_prompt_tokens == 1 and row.token_ids.tolist() == [row.key + 1, 7] and not row.token_ids.flags.writeable
            kept = logits[i, self.tokens[row.key]].clone()
            logits[i] = -torch.inf
            logits[i, self.tokens[row.key]] = kept
            if (row.key, "apply") in self.raising:
                raise ZeroDivisionError("division by zero")
        return logits


class Flat(Only):
    """As a filter, after the others: drops all but the tokens that are still there, of which it makes equals."""

    argmax_invariant = True

    def apply(self, logits, rows):
        assert (logits <= 0).all()
        return torch.where(logits > -torch.inf, 0.0, -torch.inf)


class Short(Only):
    def apply(self, logits, rows):
        return logits[:, :-1]


class Silent(Only):
    argmax_invariant = None


class Brings:
    name = "brings"

    @hookimpl
    def toolkit_register_logits_processors(self, processors):
        for one in (Only, Flat, Short, Silent):
            processors.add(one.__name__.lower(), f"processors_under_test:{one.__name__}")


@pytest.fixture
def make_table(monkeypatch):
    module = types.ModuleType("processors_under_test")
    module.Only, module.Flat, module.Short, module.Silent = Only, Flat, Short, Silent
    monkeypatch.setitem(sys.modules, module.__name__, module)
    registry = Plugins.load(PluginsConfig(plugins=[]), extra=[Brings()]).logits_processors

    return lambda: ProcessorTable(registry, VllmConfig.default(), torch.device("cpu"))


def rows_of(make_rows, params, table=None):
    return make_rows(*params, prompts=[[key + 1] for key in range(len(params))], outputs=[[7]] * len(params), processors=table)


def only(**arguments):
    return {"logits_processors": {"only": arguments}}


def test_a_sequence_keeps_its_arguments_whatever_its_row(make_rows, make_logits, make_table):
    params = [SamplingParams(**only(token=3)), SamplingParams(), SamplingParams(temperature=0, **only(token=9))]
    rows, logits = rows_of(make_rows, params, make_table()), make_logits(3)
    plain = sample(logits[1:2], rows_of(make_rows, params).select(np.array([1]))).token_ids[0]
    assert sample(logits, rows).token_ids == [3, plain, 9]
    order = np.array([2, 0])
    assert sample(logits[:2], rows.select(order)).token_ids == [9, 3]
    rows.clear(2)
    assert sample(logits[:1], rows.select(order[1:])).token_ids == [3]


def test_an_argmax_invariant_one_works_last_and_not_on_greedy_rows(make_rows, make_logits, make_table):
    flat = {"logits_processors": {"flat": {"token": 0}}}
    params = [SamplingParams(top_k=4, seed=i, **flat) for i in range(4000)] + [SamplingParams(temperature=0, **flat)]
    logits = make_logits(1).expand(len(params), -1)
    *drawn, greedy = sample(logits, rows_of(make_rows, params, make_table())).token_ids
    assert greedy == int(logits[0].argmax())
    counts = np.bincount(drawn, minlength=64)
    assert set(np.flatnonzero(counts)) == set(logits[0].topk(4).indices.tolist())
    assert (np.abs(counts[counts > 0] - 1000) < 130).all()


@pytest.mark.parametrize("place", ["add", "apply"])
def test_one_that_raises_fails_its_request_alone(make_rows, make_logits, make_table, place):
    params = [SamplingParams(**only(token=3)), SamplingParams(**only(token=4, **{"raise": place})), SamplingParams(**only(token=5))]
    table = make_table()
    rows = rows_of(make_rows, params, table)
    sampled = sample(make_logits(3), rows)
    assert set(sampled.errors) == {1}
    assert "logits processor 'only' of" in sampled.errors[1] and "brings" in sampled.errors[1]
    assert ("ZeroDivisionError" if place == "apply" else "KeyError") in sampled.errors[1]
    assert [sampled.token_ids[i] for i in (0, 2)] == [3, 5]
    rows.clear(1)
    assert table.errors == {}


def test_a_result_of_another_shape_is_an_error(make_rows, make_logits, make_table):
    params = [SamplingParams(logits_processors={"short": {"token": 1}}), SamplingParams()]
    sampled = sample(make_logits(2), rows_of(make_rows, params, make_table()))
    assert list(sampled.errors) == [0] and "returned shape (1, 63) for (1, 64)" in sampled.errors[0]


def test_the_class_on_the_hooks_page(make_rows, make_logits, monkeypatch):
    page = Path(__file__).parents[3] / "docs" / "hooks" / "toolkit_register_logits_processors.md"
    _, _, plugin, processor = page.read_text(encoding="utf-8").split("```python\n")
    for name, code in (("no_echo_plugin", plugin), ("toolkit_lm_mine", ""), ("toolkit_lm_mine.no_echo", processor)):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(code.split("```")[0], module.__dict__)
    registry = Plugins.load(PluginsConfig(plugins=[]), extra=[sys.modules["no_echo_plugin"]]).logits_processors
    with pytest.raises(ValueError, match="penalty"):
        registry.load("no_echo").check({})
    table = ProcessorTable(registry, VllmConfig.default(), torch.device("cpu"))
    logits = make_logits(1)
    best, second = logits[0].topk(2).indices.tolist()
    params = SamplingParams(temperature=0, logits_processors={"no_echo": {"penalty": 100.0}})
    assert sample(logits, make_rows(params, prompts=[[best, best]], processors=table)).token_ids == [second]


def test_one_that_does_not_say_what_it_is(make_rows, make_logits, make_table):
    params = [SamplingParams(logits_processors={"silent": {"token": 1}}), SamplingParams()]
    sampled = sample(make_logits(2), rows_of(make_rows, params, make_table()))
    assert list(sampled.errors) == [0] and "must state argmax_invariant = True or False" in sampled.errors[0]


def test_one_that_raises_in_remove_is_warned_about(make_rows, make_table):
    rows = rows_of(make_rows, [SamplingParams(**only(token=3, **{"raise": "remove"}))], make_table())
    with pytest.warns(PluginWarning, match="'only'.*cannot leave"):
        rows.clear(0)
