"""Measured steps on disk: what they are of, and that damaged files are as good as none."""

from __future__ import annotations

import importlib
import itertools

import pytest
from toolkit_lm import LLM
from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm_drafters.step_table import StepTable

warm_up = importlib.import_module("toolkit_lm.runner.warm_up")
STEPS = [(1, -1, 0.001), (4, 0, 0.002)]


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "toolkit_lm" / "steps"


@pytest.fixture(scope="module")
def plugins():
    return Plugins.load(VllmConfig.make(model="tiny").plugins)


def table(plugins, **options):
    return StepTable(VllmConfig.make(**{"model": "tiny", "drafter": "ngram"} | options), plugins)


def test_steps_are_found_again(plugins, folder):
    assert table(plugins).read() == []
    table(plugins).write(STEPS)
    assert table(plugins).read() == STEPS
    assert [path.suffix for path in folder.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "options",
    [
        {"model": "tiny-draft"},
        {"drafter": "ngram,suffix"},
        {"dtype": "float32"},
        {"kernels": "torch"},
        {"block_size": 32},
        {"plugin_option": ["drafters.num_speculative_tokens=2"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_others_have_a_table_of_their_own(plugins, options):
    assert table(plugins, **options).path != table(plugins).path
    assert table(plugins, max_num_seqs=3).path == table(plugins).path


@pytest.mark.parametrize(
    "text", ["", "[[1, -1, 0]]", "[[0, 1, 0.1]]", '{"a": 1}', "[[1, 1, null]]"]
)
def test_a_damaged_file_is_as_good_as_none(plugins, text):
    own = table(plugins)
    own.write(STEPS)
    own.path.write_text(text)
    assert own.read() == []
    own.write(STEPS)
    assert own.read() == STEPS


def test_a_folder_that_cannot_be_written_is_left_out(plugins, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    table(plugins).write(STEPS)
    assert table(plugins).read() == []


def test_a_later_start_measures_only_what_is_missing(monkeypatch):
    monkeypatch.setattr(warm_up, "_KEPT", -1.0)
    monkeypatch.setattr(warm_up, "_MEASURING", 1e9)
    measured = []
    seconds_of = warm_up._seconds_of_decode

    def watched(runner, rows, num_drafts):
        measured.append((rows, num_drafts))
        return seconds_of(runner, rows, num_drafts)

    monkeypatch.setattr(warm_up, "_seconds_of_decode", watched)
    for cells in ([(0, 1)], [(2, 1), (1, 1), (0, 1)], [(0, 1), (1, 1), (2, 1)]):
        monkeypatch.setattr(warm_up, "product", lambda *_, cells=cells: cells)
        with LLM("tiny", drafter="ngram", max_model_len=64) as llm:
            facts = llm.engine.client.core.scheduler.draft_budget.facts
    assert measured == [(1, -1), (1, 0), (1, 1)]
    assert [step[:2] for step in facts.step_times] == measured


def test_steps_of_few_tokens_are_measured_before_those_of_many(monkeypatch):
    """The time for it may end before the largest: without any step with drafts nothing is known."""
    measured = []
    monkeypatch.setattr(
        warm_up, "_seconds_of_decode", lambda _, *cell: measured.append(cell) or 0.001
    )
    options = {"max_model_len": 64, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    with LLM("tiny", drafter="ngram", **options):
        pass
    assert sorted(measured[:4]) == [(1, -1), (4, -1), (16, -1), (64, -1)]
    assert sorted(measured) == sorted(itertools.product((1, 4, 16, 64), (-1, 0, 1, 3, 7)))
    sizes = [rows * (drafts + 1) for rows, drafts in measured[4:]]
    assert sizes == sorted(sizes)
