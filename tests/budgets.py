"""The budgets that keep the project small: tokens of core, tokens of a line of core, lines of a
file, of a class, of a function and of some distributions, methods of a class, columns of a line.

usage: python tests/budgets.py

Comments, docstrings, ends of lines and indentation do not count. A text that stands alone as a
statement is a docstring.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "src" / "toolkit_lm"
SOURCES = ("core/src", "libs/*/src", "plugins/*/src", "contrib_*/*/src")

CORE_TOKENS = 158_110
"""Tokens that core may have. Tokens, since a budget of lines pays for dense ones."""
LINE_TOKENS = 8.5
"""Tokens that a line of core may have, in the mean over all lines that have any."""
FILE_LINES = 500
"""Lines that a file may have, whatever is on them."""
CLASS_LINES = 400
"""Lines that a class may have, from its first to its last."""
CLASS_METHODS = 20
"""Public methods that a class may have; properties are none."""
WIDE_CLASSES = {
    "plugins/devkit/src/toolkit_lm_devkit": "a class of the conformance kit has a method a test",
}
"""Reasons for classes with more methods, by folder."""
FUNCTION_LINES = 60
"""Lines that a function may have, with its signature and docstring, without its decorators."""
LONG_FUNCTIONS = {
    "contrib_backends/triton/src/toolkit_lm_triton/kernels": (
        "a kernel of Triton is compiled as a whole, and keeps what it loads in registers"
    ),
}
"""Reasons for longer functions, by folder."""
LINE_COLUMNS = 100
"""Characters that a line may have. Ruff counts those of Python."""
CODE_LINES = {"plugins/ray_serve/src": 200}
"""Lines of code that a distribution may have, where it promises to be small, by folder."""
LANGUAGES = frozenset({".c", ".h", ".js", ".css", ".html", ".svg", ".in"})
"""Endings of the files whose lines are counted here. `.in` is that of templates."""

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def main() -> int:
    """Prints the tokens of core's rooms, and what is over a budget. Returns the exit code."""
    rooms = tokens_of_rooms(CORE)
    for room, count in sorted(rooms.items()):
        print(f"{count:7,}  {room}")
    print(f"{rooms.total():7,}  tokens of core, of {CORE_TOKENS:,}")
    density = rooms.total() / max(code_lines(CORE), 1)
    print(f"{density:7.2f}  tokens of a line of core, of {LINE_TOKENS}")
    folders = [folder for pattern in SOURCES for folder in sorted(ROOT.glob(pattern))]
    problems = [
        problem for folder in folders for find in (oversized, wide) for problem in find(folder)
    ]
    if rooms.total() > CORE_TOKENS:
        problems.append(f"core has {rooms.total():,} tokens, and may have {CORE_TOKENS:,}")
    if density > LINE_TOKENS:
        problems.append(
            f"a line of core has {density:.2f} tokens in the mean, and may have {LINE_TOKENS}"
        )
    for folder, most in CODE_LINES.items():
        if (count := code_lines(ROOT / folder)) > most:
            problems.append(f"{folder} has {count} lines of code, and may have {most}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return bool(problems)


def tokens_of_rooms(package: Path) -> Counter[str]:
    """The tokens of each folder of a package, its own modules under their names."""
    rooms: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        rooms[path.relative_to(package).parts[0]] += count_tokens(path.read_text(encoding="utf-8"))
    return rooms


def code_lines(package: Path) -> int:
    """How many lines of a package's modules hold code."""
    return sum(
        len({token.start[0] for token in code_of(path.read_text(encoding="utf-8"))})
        for path in package.rglob("*.py")
    )


def count_tokens(source: str) -> int:
    """How many tokens of a module are code. Raises SyntaxError."""
    return sum(1 for _ in code_of(source))


def code_of(source: str) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a module that are code. Raises SyntaxError."""
    docstrings = _docstring_lines(ast.parse(source))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if token.type not in _NO_CODE and not is_docstring:
            yield token


def oversized(folder: Path) -> Iterator[str]:
    """The files, classes and functions below a folder that are over their budget."""
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        name = _name(path)
        if (length := len(source.splitlines())) > FILE_LINES:
            yield f"{name} has {length} lines, and may have {FILE_LINES}"
        for node in ast.walk(ast.parse(source)):
            place = f"{name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ClassDef):
                yield from _over_of_class(node, place)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = _last_line(node) - node.lineno + 1
                if length > FUNCTION_LINES and not _is_in(place, LONG_FUNCTIONS):
                    yield f"{place}: {node.name} has {length} lines, and may have {FUNCTION_LINES}"


def _over_of_class(node: ast.ClassDef, place: str) -> Iterator[str]:
    length = _last_line(node) - node.lineno + 1
    if length > CLASS_LINES:
        yield f"{place}: class {node.name} has {length} lines, and may have {CLASS_LINES}"
    methods = [
        one
        for one in node.body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
        and one.name[0] != "_"
        and not any(
            "property" in ast.dump(by) or "setter" in ast.dump(by) for by in one.decorator_list
        )
    ]
    if len(methods) > CLASS_METHODS and not _is_in(place, WIDE_CLASSES):
        yield (
            f"{place}: class {node.name} has {len(methods)} public methods, and may have "
            f"{CLASS_METHODS}"
        )


def _is_in(place: str, folders: dict[str, str]) -> bool:
    return any(place.startswith(f"{folder}/") for folder in folders)


def wide(folder: Path) -> Iterator[str]:
    """The lines below a folder that have too many columns, of languages that Ruff does not read."""
    for path in sorted(path for path in folder.rglob("*") if path.suffix in LANGUAGES):
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if (columns := len(line)) > LINE_COLUMNS:
                at = f"{_name(path)}:{number}"
                yield f"{at}: the line has {columns} columns, and may have {LINE_COLUMNS}"


def _name(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def _docstring_lines(tree: ast.Module) -> set[int]:
    texts = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    return {line for node in texts for line in range(node.lineno, _last_line(node) + 1)}


def _last_line(node: ast.stmt) -> int:
    assert node.end_lineno is not None, "nodes that come from a text know their end"
    return node.end_lineno


if __name__ == "__main__":
    sys.exit(main())
