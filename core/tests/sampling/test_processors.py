"""Logits processors that plugins bring: rows, order, draws, state, errors."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import PluginError, RequestError
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import LogitsProcessorRegistry, PluginInfo, Plugins, PluginWarning, hookimpl
from toolkit_lm.sampling import (
    LogitsProcessor,
    ProcessorTable,
    sample,
    top_candidates,
    uniform,
    uniforms,
)
from torch.utils._python_dispatch import TorchDispatchMode


class Nothing(ProcessorParams):
    """Parameters of processors whose arguments tests supply themselves."""


class Only(LogitsProcessor):
    """Leaves one token, which each sequence's arguments name. Raises as asked."""

    stage = "logits"

    def __init__(self, config, device):
        super().__init__(config, device)
        self.tokens = {}
        self.raising = set()

    def add(self, row, arguments, state):
        assert (row.token_ids.tolist(), row.num_prompt_tokens) == ([row.key + 1, 7], 1)
        if arguments.get("raise") == "add":
            raise KeyError("no such word")
        if arguments.get("raise"):
            self.raising.add((row.key, arguments["raise"]))
        self.tokens[row.key] = arguments["token"]

    def remove(self, key):
        if (key, "remove") in self.raising:
            raise RuntimeError("cannot leave")
        self.tokens.pop(key, None)

    def apply(self, values, rows):
        assert values.shape == (len(rows), 64) and values.dtype == torch.float32
        for i, row in enumerate(rows):
            assert (
                row.num_prompt_tokens == 1
                and row.token_ids.tolist() == [row.key + 1, 7]
                and not row.token_ids.flags.writeable
            )
            kept = values[i, self.tokens[row.key]].clone()
            values[i] = -torch.inf
            values[i, self.tokens[row.key]] = kept
            if (row.key, "apply") in self.raising:
                raise ZeroDivisionError("division by zero")
        return values

    def after_draw(self, row, token_id, prob):
        assert (row.token_ids.tolist(), token_id, prob) == (
            [row.key + 1, 7],
            self.tokens[row.key],
            1.0,
        )
        if (row.key, "after_draw") in self.raising:
            raise ZeroDivisionError("division by zero")


class Flat(Only):
    """A filter that runs after the others: it gives all remaining tokens the same probability, and
    drops the rest."""

    stage = "probs"

    def apply(self, values, rows):
        assert torch.allclose(values.sum(dim=-1), torch.ones(len(rows)))
        return (values > 0).float()

    def after_draw(self, row, token_id, prob):
        return {"prob": prob}


class Counting(LogitsProcessor):
    """A state of its own: how many tokens were drawn."""

    stage = "logits"

    def __init__(self, config, device):
        super().__init__(config, device)
        self.counts = {}

    def add(self, row, arguments, state):
        self.counts[row.key] = state.get("count", 0.0)

    def remove(self, key):
        del self.counts[key]

    def apply(self, values, rows):
        for row, scores in zip(rows, values, strict=True):
            scores[int(self.counts[row.key])] = 100.0
        return values

    def after_draw(self, row, token_id, prob):
        self.counts[row.key] += 1
        return {"count": self.counts[row.key]}


class Short(Only):
    def apply(self, values, rows):
        return values[:, :-1]


class Nan(Only):
    def apply(self, values, rows):
        return values * torch.nan


class NanProbs(Nan):
    stage = "probs"


class Infinite(Only):
    def apply(self, values, rows):
        return torch.full_like(values, torch.inf)


class Silent(Only):
    stage = None


class Doubling(Flat):
    """The first of two: the second sees what it has left."""

    def apply(self, values, rows):
        return values * (torch.arange(64) >= 32)


class Last(Flat):
    def apply(self, values, rows):
        assert not values[:, :32].any() and torch.allclose(
            values.sum(dim=-1), torch.ones(len(rows))
        )
        return (torch.arange(64) == 40).float().expand(len(rows), -1)


class Raising(Only):
    """Changes some rows before it raises for another."""

    in_logprobs = True

    def apply(self, values, rows):
        for i, row in enumerate(rows):
            values[i, self.tokens[row.key]] += 1.0
            if (row.key, "apply") in self.raising:
                raise ZeroDivisionError("division by zero")
        return values

    after_draw = LogitsProcessor.after_draw


class Barring(Only):
    atomic = True

    def apply(self, values, rows):
        if any((row.key, "apply") in self.raising for row in rows):
            raise ZeroDivisionError("division by zero")
        return super().apply(values, rows)


class Certain(Only):
    """Knows what follows, and is told of steps before they are computed."""

    def begin(self, rows):
        self.begun = [row.key for row in rows]

    def drafts(self, row):
        assert row.token_ids.tolist() == [row.key + 1, 7]
        return [self.tokens[row.key]] * row.key


CLASSES = (
    Only,
    Flat,
    Counting,
    Short,
    Nan,
    NanProbs,
    Infinite,
    Silent,
    Last,
    Doubling,
    Raising,
    Barring,
    Certain,
)


class Brings:
    name = "brings"

    @hookimpl
    def toolkit_register_logits_processors(self, processors):
        for one in CLASSES:
            priority = {Last: -1}.get(one, 0)
            processors.add(
                one.__name__.lower(),
                f"processors_under_test:{one.__name__}",
                params=Nothing,
                priority=priority,
            )


@pytest.fixture
def make_table(monkeypatch):
    module = types.ModuleType("processors_under_test")
    vars(module).update({one.__name__: one for one in CLASSES})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    registry = Plugins.load(PluginsConfig(plugins=[]), extra=[Brings()]).logits_processors

    return lambda: ProcessorTable(registry, VllmConfig.default(), torch.device("cpu"))


def rows_of(make_rows, arguments, table, params=SamplingParams(temperature=0), **more):
    """A row for each of `arguments`, {} for one without processors; `params` are all rows' or one's
    each."""
    params = params if isinstance(params, list) else [params] * len(arguments)
    prompts = [[key + 1] for key in range(len(params))]
    outputs = [[7]] * len(params)
    return make_rows(
        *params, prompts=prompts, outputs=outputs, processors=table, arguments=arguments, **more
    )


def only(**arguments):
    return {"only": arguments}


def test_a_sequence_keeps_its_arguments_whatever_its_row(make_rows, make_logits, make_table):
    rows = rows_of(make_rows, [only(token=3), {}, only(token=9)], make_table())
    logits = make_logits(3)
    assert sample(logits, rows).token_ids == [3, int(logits[1].argmax()), 9]
    order = np.array([2, 0])
    assert sample(logits[:2], rows.select(order)).token_ids == [9, 3]
    rows.clear(2)
    assert sample(logits[:1], rows.select(order[1:])).token_ids == [3]


def test_who_knows_what_follows_is_asked_for_its_own_rows(make_rows, make_table):
    table = make_table()
    asked = [
        {"certain": {"token": 3}},
        {"only": {"token": 5}},
        {"certain": {"token": 9}},
        {},
        {"certain": {"token": 4}},
    ]
    rows = rows_of(make_rows, asked, table)
    users = rows.users(np.array([4, 3, 2, 1, 0]))
    table.begin(*users)
    assert table._processors["certain"].begun == [4, 2, 0]
    assert table.drafts(*users) == {4: [4] * 4, 2: [9] * 2}, "an empty list is no draft"
    table.errors[4] = "it failed"
    assert table.drafts(*users) == {2: [9] * 2}


@pytest.mark.parametrize(
    ("arguments", "params", "follows"),
    [
        ({"certain": {"token": 3}}, {}, True),
        (
            {"certain": {"token": 3}},
            {"temperature": 1.0, "top_k": 3, "repetition_penalty": 1.2, "min_tokens": 3},
            True,
        ),
        ({"certain": {"token": 3}}, {"logprobs": 0}, False),
        ({"certain": {"token": 3}}, {"n": 1, "best_of": 2}, False),
        ({"certain": {"token": 3}}, {"allowed_token_ids": [3]}, False),
        ({"certain": {"token": 3}}, {"logit_bias": {3: 1.0}}, False),
        ({"certain": {"token": 3}, "counting": {}}, {}, False),
        ({}, {}, False),
    ],
)
def test_what_follows_needs_no_draw_where_nobody_else_has_a_say(
    make_rows, make_table, arguments, params, follows
):
    rows = rows_of(
        make_rows, [arguments], make_table(), SamplingParams(**{"temperature": 0, **params})
    )
    assert rows.follows.tolist()[0] == follows


@pytest.mark.parametrize("in_logprobs", [False, True])
def test_log_probabilities_are_the_models_own_unless_a_processor_says_otherwise(
    make_rows, make_logits, make_table, monkeypatch, in_logprobs
):
    monkeypatch.setattr(Only, "in_logprobs", in_logprobs)
    logits = make_logits(3)
    params = SamplingParams(temperature=0, logprobs=0)
    sampled = sample(
        logits, rows_of(make_rows, [only(token=3), {}, only(token=9)], make_table(), params)
    )
    found = [one.logprobs[0] for one in sampled.logprobs]
    own = [
        float(row.log_softmax(0)[token])
        for row, token in zip(logits, sampled.token_ids, strict=True)
    ]
    assert found == pytest.approx([0.0, own[1], 0.0] if in_logprobs else own, abs=1e-6)


def test_candidates_of_beams_are_what_processors_leave(make_rows, make_logits, make_table):
    params = SamplingParams(use_beam_search=True, n=2)
    rows = rows_of(
        make_rows, [only(token=3), {}, only(token=9, **{"raise": "apply"})], make_table(), params
    )
    rows.num_candidates[:] = 4
    logits = make_logits(3)
    found = top_candidates(logits, rows)
    assert (found.candidates[0].token_ids, len(found.candidates[1].token_ids)) == ([3], 4)
    assert found.candidates[0].logprobs == pytest.approx([float(logits[0].log_softmax(0)[3])])
    assert list(found.errors) == [2] and "division by zero" in found.errors[2]


def test_one_of_the_stage_probs_works_last_and_not_on_greedy_rows(
    make_rows, make_logits, make_table
):
    params = [SamplingParams(top_k=4)] * 4000 + [SamplingParams(temperature=0)]
    logits = make_logits(1).expand(len(params), -1)
    sampled = sample(
        logits, rows_of(make_rows, [{"flat": {"token": 0}}] * len(params), make_table(), params)
    )
    *drawn, greedy = sampled.token_ids
    assert greedy == int(logits[0].argmax())
    counts = np.bincount(drawn, minlength=64)
    assert set(np.flatnonzero(counts)) == set(logits[0].topk(4).indices.tolist())
    assert (np.abs(counts[counts > 0] - 1000) < 130).all()
    # It is told of the draws that it had a part in, with the probability that is left after it.
    assert sorted(sampled.states) == list(range(4000))
    assert {state["flat"]["prob"] for state in sampled.states.values()} == {0.25}


def test_of_one_stage_the_highest_priority_works_first(make_rows, make_logits, make_table):
    arguments = [{"last": {"token": 0}, "doubling": {"token": 0}}]
    assert sample(
        make_logits(1), rows_of(make_rows, arguments, make_table(), SamplingParams())
    ).token_ids == [40]


def test_the_state_survives_a_preemption(make_rows, make_logits, make_table):
    logits = make_logits(2)
    arguments = [{"counting": {}}, {}]
    whole = []
    resumed = []
    rows = rows_of(make_rows, arguments, make_table())
    states = [{}, {}]
    for _ in range(5):
        sampled = sample(logits, rows)
        whole.append(sampled.token_ids[0])
        again = rows_of(make_rows, arguments, make_table(), states=states)
        found = sample(logits, again)
        resumed.append(found.token_ids[0])
        assert list(found.states) == [0]
        states = [found.states[0], {}]
    assert whole == resumed == [0, 1, 2, 3, 4]
    assert states[0] == {"counting": {"count": 5.0}}


def test_uniforms_depend_on_seed_number_of_tokens_and_stream_only(make_rows, make_table):
    rows = make_rows(
        *[SamplingParams()] * 3, prompts=[[1], [1, 2], [3]], outputs=[[5], [], [5]], seeds=[4, 4, 4]
    )
    some = [rows.processor_row(i) for i in range(3)]
    first, second, third = uniforms(some, 2)
    assert first == third != second
    assert (uniforms(some[1:], 2) == [second, third]).all() and uniforms(some, 1)[0] != first
    assert (uniforms(some, 2) == uniform(rows.seed, rows.position, 2)).all()


@pytest.mark.parametrize(
    ("name", "place"),
    [("only", "add"), ("only", "apply"), ("only", "after_draw"), ("barring", "apply")],
)
def test_one_that_raises_fails_its_request_alone(make_rows, make_logits, make_table, name, place):
    table = make_table()
    rows = rows_of(
        make_rows,
        [{name: {"token": 3}}, {name: {"token": 4, "raise": place}}, {name: {"token": 5}}],
        table,
    )
    sampled = sample(make_logits(3), rows)
    assert set(sampled.errors) == {1}
    assert (
        "plugin 'brings' (" in sampled.errors[1]
        and f"failed in logits processor {name!r}" in sampled.errors[1]
    )
    assert ("KeyError" if place == "add" else "ZeroDivisionError") in sampled.errors[1]
    assert [sampled.token_ids[i] for i in (0, 2)] == [3, 5]
    rows.clear(1)
    assert table.errors == {} and sorted(table.names) == [0, 2]


@pytest.mark.parametrize("company", [[], [{}]], ids=["all rows", "some rows"])
def test_what_raises_on_the_way_has_changed_nothing(make_rows, make_logits, make_table, company):
    arguments = [
        {"raising": {"token": 3}},
        {"raising": {"token": 4, "raise": "apply"}},
        {"raising": {"token": 5}},
        *company,
    ]
    logits = make_logits(len(arguments))
    params = SamplingParams(temperature=0, logprobs=0)
    sampled = sample(logits, rows_of(make_rows, arguments, make_table(), params))
    assert list(sampled.errors) == [1]
    for row, token in ((0, 3), (2, 5)):
        expected = logits[row].clone()
        expected[token] += 1.0
        assert sampled.logprobs[row].logprobs[0] == pytest.approx(
            float(expected.log_softmax(0).max()), abs=1e-6
        )


class Large(TorchDispatchMode):
    """Counts new tensors of so many elements."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        known = {one.data_ptr() for one in args if isinstance(one, torch.Tensor)}
        outputs = made if isinstance(made, tuple | list) else [made]
        self.count += sum(
            isinstance(one, torch.Tensor)
            and one.numel() >= self.size
            and one.data_ptr() not in known
            for one in outputs
        )
        return made


@pytest.mark.parametrize(("name", "count"), [(None, 0), ("barring", 1), ("only", 2)])
def test_logits_are_copied_once_and_for_what_is_not_atomic_twice(
    make_rows, make_logits, make_table, name, count
):
    rows = rows_of(
        make_rows, [{name: {"token": token}} if name else {} for token in range(4)], make_table()
    )
    logits = make_logits(4).bfloat16()
    with Large(logits.numel()) as large:
        sampled = sample(logits, rows)
    assert large.count == count
    assert not sampled.errors


def test_a_result_of_another_shape_is_an_error(make_rows, make_logits, make_table):
    sampled = sample(
        make_logits(2), rows_of(make_rows, [{"short": {"token": 1}}, {}], make_table())
    )
    assert list(sampled.errors) == [0] and "returned shape (1, 63) for (1, 64)" in sampled.errors[0]


def test_one_that_leaves_no_token_fails_alone(make_rows, make_logits, make_table):
    params = [SamplingParams(allowed_token_ids=[3]), SamplingParams()]
    sampled = sample(
        make_logits(2), rows_of(make_rows, [{"doubling": {"token": 0}}] * 2, make_table(), params)
    )
    assert sampled.errors == {
        0: (
            "the request's sampling parameters leave no token that could be drawn "
            "(allowed_token_ids)"
        )
    }


@pytest.mark.parametrize(
    ("name", "temperature"),
    [("nan", 0), ("nan", 1), ("infinite", 0), ("infinite", 1), ("nanprobs", 1)],
)
def test_one_that_gives_no_numbers_fails_its_request_alone(
    make_rows, make_logits, make_table, name, temperature
):
    params = [
        SamplingParams(allowed_token_ids=[3], temperature=temperature),
        SamplingParams(temperature=temperature),
    ]
    sampled = sample(
        make_logits(2), rows_of(make_rows, [{name: {"token": 1}}, {}], make_table(), params)
    )
    assert list(sampled.errors) == [0]
    assert (
        f"failed in logits processor {name!r}: ValueError: apply() returned NaN or infinity"
        in sampled.errors[0]
    )


def test_one_that_does_not_say_where_it_works(make_rows, make_logits, make_table):
    sampled = sample(
        make_logits(2), rows_of(make_rows, [{"silent": {"token": 1}}, {}], make_table())
    )
    assert (
        list(sampled.errors) == [0]
        and "Silent.stage must be one of ('logits', 'probs')" in sampled.errors[0]
    )


def test_one_that_raises_in_remove_is_warned_about(make_rows, make_table):
    rows = rows_of(make_rows, [only(token=3, **{"raise": "remove"})], make_table())
    with pytest.warns(PluginWarning, match="'only'.*cannot leave"):
        rows.clear(0)


def test_without_any_a_step_asks_none(make_rows, make_logits, make_table, monkeypatch):
    table = make_table()
    rows = rows_of(make_rows, [{}, {}], table)
    for name in ("apply", "after_draw"):
        monkeypatch.setattr(table, name, None)
    assert sample(make_logits(2), rows).token_ids == make_logits(2).argmax(-1).tolist()


def test_the_class_on_the_hooks_page(make_rows, make_logits, monkeypatch):
    page = Path(__file__).parents[3] / "docs" / "hooks" / "toolkit_register_logits_processors.md"
    _, _, plugin, processor = page.read_text(encoding="utf-8").split("```python\n")
    for name, code in (
        ("no_echo_plugin", plugin),
        ("toolkit_lm_mine", ""),
        ("toolkit_lm_mine.no_echo", processor),
    ):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(code.split("```")[0], module.__dict__)
    registry = Plugins.load(
        PluginsConfig(plugins=[]), extra=[sys.modules["no_echo_plugin"]]
    ).logits_processors
    with pytest.raises(RequestError, match="no_echo_penalty must be between 0 and 100, not -1"):
        registry.parse({"no_echo_penalty": -1})
    arguments = [
        {
            name: params.prepare(None)
            for name, params in registry.parse({"no_echo_penalty": 100.0}).items()
        }
    ]
    table = ProcessorTable(registry, VllmConfig.default(), torch.device("cpu"))
    logits = make_logits(1)
    best, second = logits[0].topk(2).indices.tolist()
    rows = make_rows(
        SamplingParams(temperature=0), prompts=[[best, best]], processors=table, arguments=arguments
    )
    assert sample(logits, rows).token_ids == [second]


class Shout(ProcessorParams):
    shout: Annotated[float, param("Shout.", ge=0, le=1)] = 0.0


class Temperature(ProcessorParams):
    temperature: Annotated[float, param("Another.")] = 1.0


def registry_of(*entries):
    class Registers:
        name = "registers"

        @hookimpl
        def toolkit_register_logits_processors(self, processors):
            for name, params, options in entries:
                processors.add(name, "module:Class", params=params, **options)

    return Plugins.load(PluginsConfig(plugins=[]), extra=[Registers()]).logits_processors


def test_parameters_are_found_by_name():
    registry = registry_of(("loud", Shout, {}))
    assert [(name, o.help) for name, o in registry.params.items()] == [("shout", "Shout.")]
    assert registry.parse({"shout": 0.5}) == {"loud": Shout(shout=0.5)}
    assert registry.parse({}) == {}
    with pytest.raises(RequestError, match=r"shout must be between 0 and 1, not 2\.") as error:
        registry.parse({"shout": 2})
    assert error.value.param == "shout"
    with pytest.raises(
        RequestError, match=r"unknown sampling parameter 'shot'. Did you mean 'shout'"
    ) as error:
        registry.parse({"shot": 2})
    assert error.value.param == "shot"
    with pytest.raises(
        RequestError, match=r"'dry_multiplier'. It comes with toolkit-lm-sampling-extra\."
    ):
        registry.parse({"dry_multiplier": 2})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("loud", Temperature, {})], "'loud': there is a parameter 'temperature' of core already"),
        (
            [("loud", Shout, {}), ("louder", Shout, {})],
            "'louder': there is a parameter 'shout' of .*registers.* already",
        ),
        (
            [("loud", dict, {})],
            "params of logits processor 'loud' must be a toolkit_lm.param_spec.ProcessorParams",
        ),
    ],
)
def test_a_name_that_is_taken_is_an_error_of_the_plugin(entries, message):
    with pytest.raises(PluginError, match=message):
        registry_of(*entries)


class Structure(ProcessorParams):
    structured_outputs: Annotated[dict[str, Any] | None, param("What the output is to be.")] = None


def test_a_processor_may_read_a_parameter_of_core():
    registry = LogitsProcessorRegistry(owner=PluginInfo("mine"))
    with pytest.raises(
        RequestError,
        match=r"^unknown sampling parameter 'structured_outputs'. It comes with "
        r"toolkit-lm-structured-output",
    ):
        registry.parse({"structured_outputs": {}})
    registry.add("structure", "mine:Structure", params=Structure)
    assert not registry.params
    params = SamplingParams(structured_outputs={"regex": "a"}, extra_args={"shout": 0.5})
    assert params.of_processors == {"shout": 0.5, "structured_outputs": {"regex": "a"}}
    assert registry.parse({"structured_outputs": {"regex": "a"}}) == {
        "structure": Structure({"regex": "a"})
    }
    with pytest.raises(RequestError, match="structured_outputs has no effect with use_beam_search"):
        SamplingParams(
            structured_outputs={"regex": "a"}, use_beam_search=True, beam_width=2, temperature=0.0
        )
