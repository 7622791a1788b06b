"""Renders our Helm chart: the part of Go's templates that it uses, and nothing else.

Helm itself is not needed to test the chart. What is unknown here raises ValueError, so that a
template cannot pass by being left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Scope = dict[str, Any]
Nodes = list[tuple[str, Any]]
"""Text, an expression, or a block: ("text", text), ("expression", words), ("if" and the like,
(words, nodes, nodes of else))."""
_TAG = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
_WORD = re.compile(r'"[^"]*"|\(|\)|\||:=|,|[^\s()|,]+')
_BLOCKS = ("if", "with", "range", "define")


def merged(base: Any, over: Any) -> Any:
    """Values with others laid over them: mappings are merged, all else is replaced."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {key: merged(base.get(key), value) for key, value in over.items()}


class Chart:
    """A chart in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._chart = yaml.safe_load((folder / "Chart.yaml").read_text())
        self._values = yaml.safe_load((folder / "values.yaml").read_text())
        self._named: dict[str, Nodes] = {}
        for path in sorted((folder / "templates").glob("*.tpl")):
            _render(_parse(path.read_text()), {"named": self._named}, {})

    def render(self, *values: dict[str, Any], release: str = "llm") -> list[dict[str, Any]]:
        """The manifests, with values laid over the chart's own."""
        together = self._values
        for over in values:
            together = merged(together, over)
        root = {
            "Values": together,
            "Chart": {key[0].upper() + key[1:]: value for key, value in self._chart.items()},
            "Release": {"Name": release, "Namespace": "models", "Service": "Helm"},
            "Files": self._folder,
        }
        state = {"named": self._named}
        found: list[dict[str, Any]] = []
        for path in sorted((self._folder / "templates").iterdir()):
            if path.suffix != ".tpl":
                text = _render(_parse(path.read_text()), state, {".": root, "$": root})
                if path.suffix == ".yaml":
                    found += filter(None, yaml.safe_load_all(text))
        return found


def _parse(text: str) -> Nodes:
    """The nodes of a template. Raises ValueError for a block without an end."""
    parts = _TAG.split(text)
    # Text, then for each tag whether it trims to its left, its content, whether to its right, text.
    stack: list[tuple[list[str], Nodes, Nodes | None]] = [([], [], None)]
    for at in range(0, len(parts), 4):
        piece = parts[at]
        if at and parts[at - 1]:
            piece = piece.lstrip()
        if at + 1 < len(parts) and parts[at + 1]:
            piece = piece.rstrip()
        _nodes(stack[-1]).append(("text", piece))
        if at + 2 < len(parts):
            _open_or_close(stack, _WORD.findall(parts[at + 2]))
    if len(stack) != 1:
        raise ValueError(f"{' '.join(stack[-1][0])} has no end")
    return stack[0][1]


def _nodes(level: tuple[list[str], Nodes, Nodes | None]) -> Nodes:
    return level[1] if level[2] is None else level[2]


def _open_or_close(stack: list[tuple[list[str], Nodes, Nodes | None]], words: list[str]) -> None:
    if words[0] in _BLOCKS:
        stack.append((words, [], None))
    elif words == ["else"]:
        stack[-1] = (stack[-1][0], stack[-1][1], [])
    elif words == ["end"]:
        (kind, *rest), first, other = stack.pop()
        _nodes(stack[-1]).append((kind, (rest, first, other or [])))
    else:
        _nodes(stack[-1]).append(("expression", words))


def _render(nodes: Nodes, state: Scope, scope: Scope) -> str:
    return "".join(piece for node in nodes for piece in _pieces(node, state, scope))


def _pieces(node: tuple[str, Any], state: Scope, scope: Scope) -> Iterator[str]:
    kind, content = node
    if kind == "text":
        yield content
        return
    if kind == "expression":
        yield _shown(_value(content, state, scope))
        return
    words, first, other = content
    if kind == "define":
        state["named"][json.loads(words[0])] = first
        return
    names: list[str] = []
    if ":=" in words:
        names = [word for word in words[: words.index(":=")] if word != ","]
        words = words[words.index(":=") + 1 :]
    found = _value(words, state, scope)
    if kind == "range":
        items = sorted(found.items()) if isinstance(found, dict) else enumerate(found or ())
        for key, value in items:
            named = dict(zip(names, (key, value), strict=False))
            yield _render(first, state, scope | {".": value} | named)
        return
    inner = scope | {".": found} if kind == "with" else scope
    yield _render(first, state, inner) if found else _render(other, state, scope)


def _value(words: list[str], state: Scope, scope: Scope) -> Any:
    """The value of a pipeline: each call gets the value before it as its last argument."""
    found: list[Any] = []
    while words:
        cut = words.index("|") if "|" in words else len(words)
        found = [_call(words[:cut], found, state, scope)]
        words = words[cut + 1 :]
    return found[0]


def _call(words: list[str], last: list[Any], state: Scope, scope: Scope) -> Any:
    name, *rest = words
    arguments = [*(_operand(word, scope) for word in rest), *last]
    if name == "include":
        return _render(state["named"][arguments[0]], state, scope | {".": arguments[1]})
    if name == ".Files.Get":
        return (scope["$"]["Files"] / arguments[0]).read_text()
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](*arguments)
    if arguments:
        raise ValueError(f"unknown function {name!r}")
    return _operand(name, scope)


_FUNCTIONS = {
    "add": lambda *numbers: sum(map(int, numbers)),
    "div": lambda left, right: int(left) // int(right),
    "eq": lambda left, right: left == right,
    "nindent": lambda count, text: (
        "\n"
        + "\n".join(" " * count + line if line else "" for line in text.rstrip("\n").split("\n"))
    ),
    "not": lambda value: not value,
    "quote": lambda value: json.dumps(_shown(value)),
    "toYaml": lambda value: yaml.safe_dump(value, default_flow_style=False).rstrip("\n"),
    "trimSuffix": lambda suffix, text: text.removesuffix(suffix),
    "trunc": lambda count, text: text[:count],
}


def _operand(word: str, scope: Scope) -> Any:
    if word.startswith('"'):
        return json.loads(word)
    if word.isdecimal():
        return int(word)
    if word.startswith("$"):
        name, *path = word.split(".")
        found = scope[name]
    elif word.startswith("."):
        found = scope["."]
        path = [part for part in word.split(".") if part]
    else:
        raise ValueError(f"unknown word {word!r}")
    for part in path:
        # Helm makes nothing of what is missing; here it is an error.
        found = found[part]
    return found


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)
