"""No distribution casts an engine: what takes one says with a protocol what it needs of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    source
    for pattern in ("core/src", "*/*/src", "downstream/*/src")
    for source in ROOT.glob(pattern)
    if "." not in source.relative_to(ROOT).parts[0]
)
ENGINES = ("AsyncLLM", "LLMEngine", "BudgetedLLM", "BudgetedModel", "ServingEngine", "ServedModel")


def casts_of_engines(code: str) -> list[str]:
    """The types that engines are cast to."""
    return [
        kind
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("cast") and node.args
        if any(name in (kind := ast.unparse(node.args[0])) for name in ENGINES)
    ]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.parent.name)
def test_no_engine_is_cast(source):
    found = {
        str(file.relative_to(ROOT)): casts
        for file in sorted(source.rglob("*.py"))
        if "cast(" in (code := file.read_text()) and (casts := casts_of_engines(code))
    }
    assert not found


def test_a_cast_is_found():
    code = 'a = cast("AsyncLLM", b)\nc = typing.cast(BudgetedLLM, d)\ne = cast(int, f)'
    assert casts_of_engines(code) == ["'AsyncLLM'", "BudgetedLLM"]
