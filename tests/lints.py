"""Rules of style that no linter has: how code is laid out, and that a test can fail.

usage: python tests/lints.py [FILE...]

Without a file it looks at all files that git knows, and at the wording of all docstrings together.
Each line says where a fault is, and how to mend it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from pathlib import Path

ROOT = Path(__file__).parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | ast.ClassDef | Function

_CHECKS = re.compile(r"_*(assert|check|expect|verify|must)(_|$)|assert[A-Z]")
"""Names of functions that fail where something is not as it must be."""
_COLUMNS = 100
_PRAGMA = re.compile(r"# (type: ignore|noqa|nosec)")
_OF_PYTEST = {"raises", "warns", "fail", "deprecated_call"}
_DEPTH = 4
"""Helpers that may stand between a test and the assertion."""

_OPENER = re.compile(r"(Of|As|By|What|Those|Where)\b")
_NEGATION = re.compile(
    r"(?<!there )\b(is|are) no (?!longer\b|more\b)|\bnobody that\b", re.IGNORECASE
)
"""A negated noun as predicate ("it is no option"). "There is no option" passes."""
_SHARE = 0.05
"""Share of a place's docstrings that may begin with a word of `_OPENER`."""
_OPENERS = {
    "contrib_backends/src": 0,
    "core/src": 0,
    "plugins/tests: negation": 0,
    "tests: negation": 2,
}
"""Limits in place of `_SHARE`, as counts, for places that have more yet. They only go down."""
_VAGUE = re.compile(r"_*(beside|given|its?|one|said|take(n|_\w+)?|told|what|which|whose)")
"""Names that say nothing of what they name. Those of `take` are of functions only."""
_COMMENT = re.compile(r"# (As|By|Of|What) ")
_WORDS = 25
"""Words of a sentence, at the 95th percentile of a distribution."""
_LONGER = {"benchmarks": 26}
"""Limits in place of `_WORDS`, for distributions whose sentences are longer yet."""
_SAME_SENTENCES = 2
"""Hooks of one module whose docstrings may share a sentence."""


def main(names: Iterable[str] = ()) -> int:
    """Prints what is found in the files. Returns the exit code."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    tests = Tests(ROOT / name for name in listed.splitlines() if (ROOT / name).is_file())
    found = 0
    for path in [Path(name).resolve() for name in names] or sorted(tests.paths):
        tree = tests.tree(path)
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        source = path.read_text(encoding="utf-8")
        problems = [
            *packed(tree),
            *nested(tree),
            *orphans(tree),
            *overlong(source),
            *turned(source),
        ]
        problems += vague(tree) if "src" in path.parts else ()
        if path.name.startswith("test_"):
            problems += tests.idle(path)
        for line, what in sorted(problems):
            print(f"{shown}:{line}: {what}", file=sys.stderr)
        found += len(problems)
    if not names:
        for fault in worded({path.relative_to(ROOT): tests.tree(path) for path in tests.paths}):
            print(fault, file=sys.stderr)
            found += 1
    return bool(found)


def overlong(source: str) -> Iterator[tuple[int, str]]:
    """Lines that a pragma makes too long: Ruff does not count it, and a reader does."""
    for number, line in enumerate(source.split("\n"), 1):
        if len(line) > _COLUMNS and _PRAGMA.search(line):
            yield number, f"{len(line)} columns with its pragma, of {_COLUMNS}: break the statement"


def packed(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Assignments of several values to as many targets, none of which has to do with another."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple | ast.List)
            and isinstance(node.value, ast.Tuple | ast.List)
        ):
            targets = node.targets[0].elts
            values = node.value.elts
            stars = any(isinstance(one, ast.Starred) for one in (*targets, *values))
            if 1 < len(targets) == len(values) and not stars and not _are_bound(targets, values):
                yield node.lineno, "targets that are packed together: give each a line of its own"


def _are_bound(targets: list[ast.expr], values: list[ast.expr]) -> bool:
    """A value reads a target, as in a swap; or a target is a part of another."""
    whole = {_form(one) for one in targets}
    names = {form for one in targets for form in _forms(one)}
    read = {form for one in values for form in _forms(one)}
    inside = {form for one in targets for form in _forms(one) if form != _form(one)}
    unpacked = any(isinstance(one, ast.Tuple | ast.List) for one in targets)
    return bool(names & read if unpacked else whole & (read | inside))


def _forms(node: ast.expr) -> set[str]:
    """Names that an expression reads or writes, and all parts of them."""
    places = ast.Name | ast.Attribute | ast.Subscript
    return {_form(one) for one in ast.walk(node) if isinstance(one, places)}


def _form(node: ast.AST) -> str:
    return re.sub(r"ctx=\w+\(\)", "", ast.dump(node))


def nested(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Conditional expressions of which a part is another."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp) and any(
            isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse)
        ):
            yield node.lineno, "a conditional expression in another: use if and elif, or a mapping"


def orphans(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts that stand alone, and say nothing of what is directly above them."""
    for scope in ast.walk(tree):
        for body in (getattr(scope, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(body, list):
                continue
            is_scope = isinstance(scope, Scope) and body is scope.body
            for before, node in zip([None, *body], body, strict=False):
                if not _is_text(node) or (before is None and is_scope):
                    continue
                if not isinstance(before, ast.Assign | ast.AnnAssign | ast.AugAssign):
                    yield (
                        node.lineno,
                        "a text that documents nothing: put it under its attribute, or write #",
                    )
                elif node.lineno != (before.end_lineno or 0) + 1:
                    yield node.lineno, "a text apart from its attribute: put it on the next line"


def vague(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Functions, parameters, variables and attributes with a name of `_VAGUE`."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        else:
            continue
        is_function = isinstance(node, Function)
        if _VAGUE.fullmatch(name) and (is_function or not name.lstrip("_").startswith("take")):
            yield node.lineno, f'"{name}" names nothing: use the noun or verb of what it is'


def turned(source: str) -> Iterator[tuple[int, str]]:
    """Comments that do not begin with their subject. Further lines of a comment pass."""
    before = ""
    for number, line in enumerate(source.split("\n"), 1):
        text = line.strip()
        if (match := _COMMENT.match(text)) and not before.startswith("#"):
            yield number, f'a comment that begins with "{match[1]}": put the subject first'
        before = text


def worded(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Docstrings that a reader has to read twice. Most rules count per place: see `_OPENERS`."""
    totals: Counter[str] = Counter()
    openers: dict[str, list[str]] = defaultdict(list)
    lengths: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for path, tree in sorted(trees.items()):
        place = _place(path)
        for line, text in docstrings(tree):
            where = f"{path}:{line}"
            totals[place] += 1
            if match := _OPENER.match(text):
                openers[place].append(f'{where}: begins with "{match[0]}": put the subject first')
            if match := _NEGATION.search(" ".join(text.split())):
                openers[f"{place}: negation"].append(
                    f'{where}: "{match[0].strip()}": say it plainly'
                )
            lengths[_distribution(path)] += [
                (len(sentence.split()), where) for sentence in sentences(text)
            ]
        if path.name == "hookspecs.py":
            yield from (f"{path}:{line}: {what}" for line, what in repeated(tree))
    for place, found in openers.items():
        if len(found) > (limit := _OPENERS.get(place, int(_SHARE * totals[place]))):
            yield from found
            yield f"{place}: {len(found)} such docstrings, limit {limit} (of {totals[place]})"
    for name, counted in lengths.items():
        counted.sort()
        words, _ = counted[ceil(0.95 * len(counted)) - 1]
        if words > (limit := _LONGER.get(name, _WORDS)):
            yield from (
                f"{where}: a sentence of {words} words" for words, where in counted if words > limit
            )
            yield f"{name}: sentences of {words} words at the 95th percentile, limit {limit}"


def _place(path: Path) -> str:
    """The folder whose docstrings are counted together, such as "plugins/src"."""
    parts = path.parts[:-1]
    kinds = [part for part in ("src", "tests") if part in parts[1:]]
    return "/".join([*parts[:1], *kinds[:1]]) or "."


def _distribution(path: Path) -> str:
    return "/".join(
        path.parts[: 1 if path.parts[0] in ("core", "tests", "benchmarks", "docs") else 2]
    )


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of modules, classes, functions and attributes."""
    for scope in ast.walk(tree):
        if isinstance(scope, Scope):
            for before, node in zip([None, *scope.body], scope.body, strict=False):
                if _is_text(node) and (
                    before is None or isinstance(before, ast.Assign | ast.AnnAssign)
                ):
                    yield node.lineno, ast.literal_eval(ast.unparse(node)).strip()


def sentences(text: str) -> Iterator[str]:
    """Sentences of prose. A blank line or an item of a list ends one."""
    for paragraph in re.split(r"\n[ \t]*\n|\n[ \t]*(?:-|\d+\.) ", text):
        yield from filter(None, re.split(r"(?<=[.!?])\s+", paragraph.strip()))


def repeated(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Sentences that stand in the docstrings of many hooks: the module's says them once."""
    hooks: dict[str, list[int]] = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, Function) and "hookspec" in map(ast.unparse, node.decorator_list):
            for sentence in sentences(ast.get_docstring(node) or ""):
                hooks[" ".join(sentence.split())].append(node.lineno)
    for sentence, lines in hooks.items():
        if len(lines) > _SAME_SENTENCES:
            for line in lines:
                yield (
                    line,
                    f'"{sentence}" stands in {len(lines)} hooks: say it once in the module\'s',
                )


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


class Tests:
    """All modules, so that the helpers of a test are found where they are written."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = frozenset(paths)
        self._trees: dict[Path, ast.Module] = {}
        self._by_stem: dict[str, list[Path]] = {}
        for path in sorted(self.paths):
            self._by_stem.setdefault(path.stem, []).append(path)
        self._functions: dict[Path, dict[str, list[Function]]] = {}

    def tree(self, path: Path) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = ast.parse(path.read_text(encoding="utf-8"))
        return self._trees[path]

    def idle(self, path: Path) -> Iterator[tuple[int, str]]:
        """Tests of a module that fail only where something raises by itself."""
        for node in ast.walk(self.tree(path)):
            if (
                isinstance(node, Function)
                and node.name.startswith("test_")
                and not any("fixture" in ast.dump(one) for one in node.decorator_list)
                and not self._can_fail(node, path, _DEPTH)
            ):
                yield node.lineno, f"{node.name} asserts nothing: compare what it makes"

    def _can_fail(self, function: Function, path: Path, depth: int) -> bool:
        calls: set[str] = {one.arg for one in function.args.args}
        for node in ast.walk(function):
            if isinstance(node, ast.Assert):
                return True
            if isinstance(node, ast.Raise) and "AssertionError" in ast.dump(node):
                return True
            if isinstance(node, ast.keyword) and node.arg == "check":
                # A process that fails, fails the test.
                return True
            if isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                if _CHECKS.match(name) or name in _OF_PYTEST:
                    return True
                calls.add(name)
        return depth > 0 and any(
            helper is not function and self._can_fail(helper, where, depth - 1)
            for name in calls
            for where, helper in self._helpers(name, path)
        )

    def _helpers(self, name: str, path: Path) -> Iterator[tuple[Path, Function]]:
        """Functions and fixtures of that name, in the module, what it imports and conftest.py."""
        for where in (path, *self._imported(path), *self._conftests(path)):
            for function in self._of(where).get(name, ()):
                yield where, function

    def _of(self, path: Path) -> dict[str, list[Function]]:
        if path not in self._functions:
            found = self._functions[path] = {}
            for node in ast.walk(self.tree(path)):
                if isinstance(node, Function):
                    found.setdefault(node.name, []).append(node)
        return self._functions[path]

    def _imported(self, path: Path) -> Iterator[Path]:
        for node in ast.walk(self.tree(path)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                for found in self._by_stem.get(name.rpartition(".")[2], ()):
                    if "src" not in found.parts or "devkit" in found.parts:
                        yield found

    def _conftests(self, path: Path) -> Iterator[Path]:
        for folder in path.parents:
            if (conftest := folder / "conftest.py") in self.paths:
                yield conftest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
