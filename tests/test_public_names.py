"""The public names of core: those of its rooms' faces and of its own modules, and no others are
imported by other distributions.

usage: python tests/test_public_names.py (writes the list)
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "src" / "toolkit_lm"
LISTED = ROOT / "core" / "public_names.txt"
USERS = ("plugins/*/src", "libs/*/src", "contrib_*/*/src", "downstream", "docs/examples")
"""Sources that have only what is public. Tests, benchmarks and what writes the pages may look
behind the faces."""
PAGES = ("README.md", "docs/**/*.md", "*/*/README.md", "plugins/*/src/**/*.in")
"""Pages and templates whose code an author copies."""


def public_names() -> list[str]:
    """Each public name of core, sorted: "toolkit_lm.attention.Attention"."""
    modules = ["toolkit_lm"]
    modules += [f"toolkit_lm.{one.parent.name}" for one in CORE.glob("*/__init__.py")]
    modules += [f"toolkit_lm.{one.stem}" for one in CORE.glob("*.py") if one.name[0] != "_"]
    return sorted(f"{module}.{name}" for module in modules for name in names_of(module))


def names_of(module: str) -> list[str]:
    """Names in `__all__`; else those that the module defines or annotates."""
    loaded = importlib.import_module(module)
    if hasattr(loaded, "__all__"):
        return list(loaded.__all__)
    tree = ast.parse(Path(loaded.__file__).read_text(encoding="utf-8"))
    return [name for statement in tree.body for name in defined(statement) if name[0] != "_"]


def defined(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module defines; imports define none."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement.name
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id


def faults(source: str, name: str) -> Iterator[str]:
    """Imports of what stands behind a face of core."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        else:
            continue
        for one in imported:
            _, *parts = one.split(".")
            if not one.startswith("toolkit_lm.") or not is_private(parts):
                continue
            yield (
                f"{name}:{node.lineno} imports {one}, which stands behind the face of "
                f"toolkit_lm.{parts[0]}: what others need is a name of its __init__."
            )


def is_private(parts: list[str]) -> bool:
    """Whether `toolkit_lm.` and these parts are a module behind a room's face, something in it, or
    a name with an underscore (but for those of Python's own kind)."""
    if any(re.match(r"_(?!_)", part) for part in parts):
        return True
    behind = CORE.joinpath(*parts[:2])
    is_module = behind.with_suffix(".py").is_file() or (behind / "__init__.py").is_file()
    if len(parts) == 2 and parts[1] in names_of(f"toolkit_lm.{parts[0]}"):
        return False
    return len(parts) > 1 and (CORE / parts[0] / "__init__.py").is_file() and is_module


def sources() -> list[Path]:
    return sorted(path for one in USERS for path in ROOT.glob(f"{one}/**/*.py"))


def test_the_public_names_are_those_of_the_list():
    """A plugin's author has them. One more is said in changes/; one less in
    docs/contract_changes.md, and API_VERSION rises."""
    assert LISTED.read_text(encoding="utf-8").splitlines() == public_names(), (
        f"write the list anew: python {Path(__file__).relative_to(ROOT)}"
    )


def test_other_distributions_import_public_names_only():
    found = [
        fault
        for path in sources()
        for fault in faults(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    ]
    assert found == []


def imports(text: str) -> list[str]:
    """The statements that import of core, in a page or template with code."""
    return re.findall(
        r"^(?:from toolkit_lm[\w.]* import (?:\([^)]*\)|[^\n(]+)|import toolkit_lm[\w.]*)",
        text,
        re.M,
    )


def test_pages_and_templates_import_public_names_only():
    paths = sorted(path for one in PAGES for path in ROOT.glob(one))
    lines = [(path, line) for path in paths for line in imports(path.read_text(encoding="utf-8"))]
    assert [one for path, line in lines for one in faults(line, path.name)] == []
    assert {path.suffix for path, _ in lines} == {".md", ".in"}


def test_the_imports_of_a_page_are_found():
    told = (
        "from toolkit_lm.model import (\n    Model,\n    norm,\n)\nimport toolkit_lm.engine.core\n"
    )
    assert [one.count("face of") for line in imports(told) for one in faults(line, "")] == [1, 1]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("from toolkit_lm.attention import Attention", False),
        ("from toolkit_lm import LLM, errors", False),
        ("from toolkit_lm.errors import RequestError", False),
        ("from toolkit_lm.attention.layer import Attention", True),
        ("from toolkit_lm.attention import layer", True),
        ("import toolkit_lm.engine.process.launch", True),
        ("from toolkit_lm.params import _ONES", True),
        ("from toolkit_lm._version import __version__", True),
    ],
)
def test_what_is_public(line, fault):
    assert bool(list(faults(line, "mine.py"))) is fault


if __name__ == "__main__":
    LISTED.write_text("".join(f"{name}\n" for name in public_names()), encoding="utf-8")
