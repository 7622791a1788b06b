"""What attention backends have in common has one home: the library `toolkit-lm-paged-attention`."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest
from toolkit_lm.attention import AttentionBackend
from toolkit_lm.kv import FullSpec
from toolkit_lm.plugin import Plugins
from toolkit_lm_paged_attention import PagedBackend

ROOT = Path(__file__).parents[1]
REGISTRY = Plugins.load().attention_backends
BACKENDS = sorted(
    entry.key for entry in REGISTRY.entries() if (ROOT / "contrib_backends" / entry.key).exists()
)
"""Those for keys and values: families may bring their own, for caches of their own."""
SPEC = FullSpec(block_size=16, num_kv_heads=2, head_size=32, dtype="float32")
FEW = 25
"""Nodes of a function, below which it may stand in several backends."""


@pytest.mark.parametrize("name", BACKENDS)
def test_keys_before_values_are_laid_out_and_stored_by_the_library(name):
    """A backend lays its pages out otherwise, or is a PagedBackend."""
    backend: type[AttentionBackend] = REGISTRY.load(name)
    if backend.page_layout(SPEC) != PagedBackend.page_layout(SPEC):
        assert not issubclass(backend, PagedBackend)
        return
    assert issubclass(backend, PagedBackend)
    assert "page_layout" not in vars(backend)


def test_no_function_stands_in_two_backends():
    places = defaultdict(set)
    for path in ROOT.glob("contrib_backends/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                name = f"{path.relative_to(ROOT / 'contrib_backends').parts[0]}: {node.name}"
                places[shape(node)].add(name)
    assert [names for text, names in places.items() if text and len(names) > 1] == []


def shape(function: ast.FunctionDef) -> str:
    """What a function does, without its name, docstring and annotations. "": it is short."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    nodes = [node for statement in body for node in ast.walk(statement)]
    if len(nodes) < FEW:
        return ""
    arguments = ",".join(one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg))
    return arguments + "".join(map(ast.dump, body))
