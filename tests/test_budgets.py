"""`budgets.py`: what it counts, and what it finds."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("budgets", Path(__file__).with_name("budgets.py"))
budgets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(budgets)

MODULE = '''"""A module,

in three lines."""

import os  # 2
# a comment

class Thing:  # 5
    """A docstring."""

    size: int = 3  # 10
    """What it is."""

    def text(self) -> str:  # 18
        return """20

        in one token""" + str(  # 23
            self.size  # 26
        )  # 27


class Failure(Exception): """On the line of its class: 33"""
'''


def test_tokens_leave_out_line_ends_comments_and_docstrings():
    assert budgets.count_tokens(MODULE) == 33
    assert (
        budgets.count_tokens("")
        == budgets.count_tokens("# nothing\n\n")
        == budgets.count_tokens('"""A docstring."""')
        == 0
    )
    assert budgets.count_tokens("a, b = 1, 2\n") > budgets.count_tokens("a = 1\n")


def test_rooms_are_folders_and_modules(tmp_path):
    (tmp_path / "room" / "inner").mkdir(parents=True)
    for name, lines in (
        ("top.py", 2),
        ("room/a.py", 3),
        ("room/inner/b.py", 4),
        ("room/notes.txt", 9),
    ):
        (tmp_path / name).write_text("x\n" * lines)
    assert budgets.tokens_of_rooms(tmp_path) == Counter({"top.py": 2, "room": 7})


@pytest.fixture
def budget(tmp_path, monkeypatch):
    """A project of one module, with budgets of 30 tokens of core, 8 lines a file and 4 a class;
    gives the exit code."""
    for name, value in {
        "ROOT": tmp_path,
        "CORE": tmp_path / "core/src/toolkit_lm",
        "CORE_TOKENS": 30,
        "FILE_LINES": 8,
        "CLASS_LINES": 4,
    }.items():
        monkeypatch.setattr(budgets, name, value)

    def call(path, source):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        return budgets.main()

    return call


@pytest.mark.parametrize(
    "folder", ["core/src/toolkit_lm", "plugins/one/src/one", "contrib_models/one/src/one"]
)
def test_a_file_or_class_over_its_budget_is_an_error(budget, capsys, folder):
    assert budget(f"{folder}/a.py", "\n" * 8) == 0
    assert budget(f"{folder}/a.py", "\n" * 9) == 1
    assert capsys.readouterr().err == f"error: {folder}/a.py has 9 lines, and may have 8\n"
    assert budget(f"{folder}/a.py", "class A:\n    x = 1\n    y = 2\n    z = 3\n") == 0
    assert (
        budget(f"{folder}/a.py", "if True:\n  class A:\n    x = 1\n\n    y = 2\n    z = 3\n") == 1
    )
    assert (
        capsys.readouterr().err == f"error: {folder}/a.py:2: class A has 5 lines, and may have 4\n"
    )


def test_a_line_of_another_language_over_its_budget_is_an_error(budget, capsys):
    fits = "é" * 100
    for ending in sorted(budgets.LANGUAGES):
        path = f"plugins/one/src/one/kernels/a{ending}"
        assert budget(path, f"{fits}\n{fits}x\n{fits}\n") == 1
        assert capsys.readouterr().err == (
            f"error: {path}:2: the line has 101 columns, and may have 100\n"
        )
        assert budget(path, f"{fits}\n{fits}\n") == 0


def test_the_lines_of_each_language_are_counted():
    """What is no Python, and no data, has its ending in LANGUAGES."""
    data = {".jinja", ".json", ".safetensors", ".so", ".pyc", ".typed"}
    known = budgets.LANGUAGES | data | {".py", ".pyi"}
    folders = [folder for pattern in budgets.SOURCES for folder in budgets.ROOT.glob(pattern)]
    paths = [path for folder in folders for path in folder.rglob("[!.]*") if path.is_file()]
    assert not [path for path in paths if path.suffix not in known]
    assert {path.suffix for path in paths} > budgets.LANGUAGES


def test_a_core_over_its_budget_is_an_error(budget, capsys):
    assert budget("core/src/toolkit_lm/a.py", "x = 1\n" * 6) == 0
    assert budget("core/src/toolkit_lm/room/b.py", "x = 1\n" * 4) == 0
    assert budget("core/src/toolkit_lm/room/b.py", "x = 1\n" * 5) == 1
    assert capsys.readouterr().err == "error: core has 33 tokens, and may have 30\n"
