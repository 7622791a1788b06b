"""`budgets.py`: what it counts, and what it finds."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("budgets", Path(__file__).with_name("budgets.py"))
budgets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(budgets)

ROOT = Path(__file__).parents[1]

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
        "CLASS_METHODS": 2,
        "FUNCTION_LINES": 5,
        "LINE_TOKENS": 5.0,
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
    """Source files other than Python and data have their ending in LANGUAGES."""
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


def test_a_function_over_its_budget_is_an_error(budget, capsys):
    head = 'def long(\n    given,\n):\n    """What it does."""\n'
    at = "plugins/one/src/one/a.py"
    assert budget(at, head + "    x = 1\n") == 0
    assert budget(at, head + "    x = 1\n" * 2) == 1
    told = f"{at}:1: long has 6 lines, and may have 5"
    assert capsys.readouterr().err == f"error: {told}\n"
    kernels = "contrib_backends/triton/src/toolkit_lm_triton/kernels/a.py"
    (budgets.ROOT / at).unlink()
    assert budget(kernels, head + "    x = 1\n" * 2) == 0


def test_a_class_with_too_many_methods_is_an_error(budget, capsys, monkeypatch):
    monkeypatch.setattr(budgets, "FILE_LINES", 80)
    monkeypatch.setattr(budgets, "CLASS_LINES", 80)
    two = "class A:\n    def a(self): ...\n    def b(self): ...\n    def _c(self): ...\n"
    two += "    @property\n    def d(self): ...\n"
    assert budget("plugins/one/src/one/a.py", two) == 0
    assert budget("plugins/one/src/one/a.py", two + "    async def e(self): ...\n") == 1
    told = "plugins/one/src/one/a.py:1: class A has 3 public methods, and may have 2"
    assert capsys.readouterr().err == f"error: {told}\n"
    (budgets.ROOT / "plugins/one/src/one/a.py").unlink()
    kit = "plugins/devkit/src/toolkit_lm_devkit/a.py"
    assert budget(kit, two + "    async def e(self): ...\n") == 0


def test_a_distribution_over_its_promise_is_an_error(budget, capsys, monkeypatch):
    """Lines without code count for nothing."""
    monkeypatch.setattr(budgets, "CODE_LINES", {"plugins/one/src": 3})
    assert budget("plugins/one/src/one/a.py", '"""Text."""\n\nx = 1\ny = 2\n# no\n') == 0
    assert budget("plugins/one/src/one/b.py", "x = 1\ny = 2\n") == 1
    told = "plugins/one/src has 4 lines of code, and may have 3"
    assert capsys.readouterr().err == f"error: {told}\n"


def test_a_dense_core_is_an_error(budget, capsys):
    """Lines without code count for nothing."""
    assert budget("core/src/toolkit_lm/a.py", '"""Text."""\n\n\nx = [1]\n') == 0
    assert budget("core/src/toolkit_lm/a.py", '"""Text."""\n\n\nx = [1, 2]\n') == 1
    told = "a line of core has 7.00 tokens in the mean, and may have 5.0"
    assert capsys.readouterr().err == f"error: {told}\n"


def test_exceptions_are_of_folders_that_exist():
    for folder in (*budgets.WIDE_CLASSES, *budgets.LONG_FUNCTIONS, *budgets.CODE_LINES):
        assert (ROOT / folder).is_dir()
