"""Private names of core in a plugin's source, found without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

CORE = "toolkit_lm"


def private_names(file: Path) -> list[str]:
    """Uses of core's private names in a Python file, as "file:line: name"."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        return [f"{file}: cannot be parsed: {error}"]
    found = sorted(set(_imported(tree)) | set(_attributes(tree)))
    return [f"{file}:{line}: {name}" for line, name in found]


def _is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


def _is_core(module: str) -> bool:
    return module.split(".")[0] == CORE


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private names in import statements."""
    for line, _, full in _bindings(tree):
        if _is_private(full):
            yield line, full


def _attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private attributes of modules, classes and functions that come from core:
    `scheduler._pool`."""
    bound = {local: full for _, local, full in _bindings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            chain = ast.unparse(node.value).split(".")
            if chain[0] in bound:
                yield node.lineno, ".".join([bound[chain[0]], *chain[1:], node.attr])


def _bindings(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, local name, what it stands for in core) of each import from core."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_core(alias.name):
                    # `import a.b` binds a; `import a.b as c` binds a.b.
                    yield (
                        node.lineno,
                        alias.asname or CORE,
                        alias.name if alias.asname or _is_private(alias.name) else CORE,
                    )
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module
            and not node.level
            and _is_core(node.module)
        ):
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{node.module}.{alias.name}"
