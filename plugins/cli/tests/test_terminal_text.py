"""Names, reasons and other texts of files, plugins and clients are shown as they are: rich reads no
markup in them."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = sorted(
    path
    for pattern in ("core/src", "libs/*/src", "plugins/*/src", "contrib_*/*/src")
    for path in ROOT.glob(f"{pattern}/**/*.py")
)
PLAIN = {"Console": ("markup", "emoji"), "TextColumn": ("markup",)}
"""Arguments that must be False, by class of rich, so that a text with brackets is neither styled
nor an error."""
MARKUP = {"from_markup", "render_markup", "rich.markup"}


def faults(source: str) -> Iterator[str]:
    """Places in a module that may read markup in a text."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and (name := getattr(node.func, "id", getattr(node.func, "attr", ""))) in PLAIN
        ):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            for argument in PLAIN[name]:
                value = given.get(argument)
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield f"line {node.lineno}: {name}({argument}=False)"
        names = [node.module] if isinstance(node, ast.ImportFrom) else [getattr(node, "attr", None)]
        yield from (f"line {node.lineno}: {name}" for name in names if name in MARKUP)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("Console(emoji=False)", "line 1: Console(markup=False)"),
        ("rich.console.Console(markup=True, emoji=False)", "line 1: Console(markup=False)"),
        ("Console(markup=False)", "line 1: Console(emoji=False)"),
        ("x = TextColumn('{task.description}')", "line 1: TextColumn(markup=False)"),
        ("from rich.markup import escape", "line 1: rich.markup"),
        ("Text.from_markup(name)", "line 1: from_markup"),
    ],
)
def test_the_check_finds(source, fault):
    assert list(faults(source)) == [fault]


def test_nothing_reads_markup():
    found = {
        str(path.relative_to(ROOT)): its
        for path in SOURCES
        if (its := list(faults(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


def test_explain_shows_brackets(toolkit, checkpoint, tmp_path):
    folder = tmp_path / "[red] odd [bold] :x: [" / "] model"
    shutil.copytree(checkpoint, folder)
    done = toolkit("explain", str(folder))
    assert done.code == 0, done.err
    assert "[red] odd [bold] :x: [/] model" in " ".join(done.out.split())
