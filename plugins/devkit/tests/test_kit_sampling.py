"""The conformance classes of logits processors and scheduling policies find what is wrong. Right
ones are what `plugins new` writes."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math

import pytest
import torch
from toolkit_lm_devkit import LogitsProcessorConformance, SchedulingPolicyConformance
from toolkit_lm_devkit.cli.new import Kind, write_plugin


@pytest.fixture
def written(tmp_path, monkeypatch):
    """written(kind, name) -> the package of such a plugin."""

    def write(kind, name):
        source = write_plugin(kind, name, tmp_path) / "src"
        monkeypatch.syspath_prepend(source)
        monkeypatch.setenv("PYTHONPATH", str(source))
        return importlib.import_module(f"toolkit_lm_{name}")

    return write


@pytest.fixture
def hush(written):
    package = written(Kind.LOGITS_PROCESSOR, "hush")
    return package.HushParams, importlib.import_module("toolkit_lm_hush.processor").Hush


def check_all(kit):
    for name, test in inspect.getmembers(kit, inspect.ismethod):
        if name.startswith("test_"):
            wanted = [
                kit.parameters()[argument].values()
                for argument in inspect.signature(test).parameters
            ]
            for values in itertools.product(*wanted):
                test(*values)


def processor_kit(params, processor, **more):
    fields = {"params": params, "processor": processor, "cases": [{"hush_penalty": 2.0}], **more}
    return type("Kit", (LogitsProcessorConformance,), fields)()


def test_a_right_processor_passes(hush):
    check_all(processor_kit(*hush, wrong=[{"hush_penalty": -1}]))


CASE = {"hush_penalty": 2.0}


def test_rows_that_depend_on_each_other_are_found(hush):
    params, processor = hush

    class Mixing(processor):
        def apply(self, values, rows):
            return values + values.flip(0)

    with pytest.raises(
        AssertionError, match=r"a row draws another token alone|the order of the rows matters"
    ):
        processor_kit(params, Mixing).test_a_row_depends_on_no_other(CASE)


@pytest.mark.parametrize("returned", ["nothing", "another number", "the number"])
def test_a_state_that_is_lost_is_found(hush, returned):
    params, processor = hush

    class Remembers(processor):
        """The last tokens decide which tokens are allowed next."""

        def add(self, row, arguments, state):
            super().add(row, arguments, state)
            self.__dict__.setdefault("last", {})[row.key] = int(state.get("last", 0))

        def apply(self, values, rows):
            for row, scores in zip(rows, values, strict=True):
                scores[torch.arange(256) % 7 != self.last[row.key] % 7] = -torch.inf
            return values

        def after_draw(self, row, token_id, prob):
            self.last[row.key] = (self.last[row.key] * 3 + token_id + 1) % 1000
            number = self.last[row.key] + (returned == "another number")
            return None if returned == "nothing" else {"last": float(number)}

    kit = processor_kit(params, Remembers)
    if returned == "the number":
        kit.test_a_preemption_changes_nothing(CASE)
    else:
        with pytest.raises(AssertionError, match="is another one after a preemption"):
            kit.test_a_preemption_changes_nothing(CASE)


def test_drafts_that_do_not_follow_are_found(hush):
    params, processor = hush

    class Guesses(processor):
        def drafts(self, row):
            return [7, 8]

    class Begins(processor):
        def begin(self, rows):
            self._penalties = {key: (tokens, 9.0) for key, (tokens, _) in self._penalties.items()}

    with pytest.raises(AssertionError, match=r"another token is drawn than drafts\(\) said"):
        processor_kit(params, Guesses).test_what_must_follow_follows(CASE)
    with pytest.raises(AssertionError, match=r"begin\(\) changes what is drawn"):
        processor_kit(params, Begins).test_what_must_follow_follows(CASE)


def test_a_random_number_of_its_own_is_found(hush):
    params, processor = hush

    class Random(processor):
        def apply(self, values, rows):
            return values + torch.randn_like(values)

    with pytest.raises(AssertionError, match="is another one after a preemption"):
        processor_kit(params, Random).test_a_preemption_changes_nothing(CASE)


def test_nothing_left_nothing_done_and_a_sequence_that_stays_are_found(hush):
    params, processor = hush

    class Greedy(processor):
        def apply(self, values, rows):
            return torch.full_like(values, -torch.inf)

    class Idle(processor):
        def apply(self, values, rows):
            return values

    class Strict(processor):
        def remove(self, key):
            del self._penalties[key]

    with pytest.raises(AssertionError, match="no token is left"):
        processor_kit(params, Greedy).test_something_is_left_to_draw(CASE)
    with pytest.raises(AssertionError):
        processor_kit(params, Idle).test_it_changes_something(CASE)
    with pytest.raises(KeyError):
        processor_kit(params, Strict).test_a_sequence_leaves(CASE)


def test_arguments_that_cannot_be_sent_are_found(hush):
    params, processor = hush

    class Sets(params):
        def prepare(self, renderer):
            return {"penalty": {1, 2}}

    with pytest.raises((AssertionError, TypeError)):
        processor_kit(Sets, processor).test_arguments_cross_processes(CASE)


def policy_kit(policy, orders=()):
    return type(
        "Kit", (SchedulingPolicyConformance,), {"policy": staticmethod(policy), "orders": orders}
    )()


ORDERS = ([{"prompt_token_ids": [5]}, {"prompt_token_ids": [5, 6]}],)


def test_a_right_policy_passes(written):
    written(Kind.SCHEDULING_POLICY, "brief")
    check_all(policy_kit(importlib.import_module("toolkit_lm_brief.policy").brief, ORDERS))


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (lambda request: request.num_prompt_tokens, "test_a_key_is_numbers"),
        (lambda request: (math.nan,), "test_a_key_is_numbers"),
        (lambda request: (1,) * (1 + (request.priority > 0)), "test_a_key_is_numbers"),
        (lambda request: (next(COUNTER),), "test_equal_requests_have_equal_keys"),
        (lambda request: (-request.num_prompt_tokens,), "test_orders"),
        (lambda request: (), "test_orders"),
    ],
)
def test_a_wrong_policy_is_found(policy, test):
    with pytest.raises(AssertionError):
        getattr(policy_kit(policy, ORDERS), test)()


COUNTER = itertools.count()
