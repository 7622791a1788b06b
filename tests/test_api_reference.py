"""The API reference has every public name: what its pages show is compared with the packages
themselves, imported."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import is_typeddict

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "api"
CORE = ROOT / "core" / "src" / "toolkit_lm"
INTERNAL = {"engine", "processing", "resolution", "runner"}
"""Rooms without a page: plugins and apps have no names of theirs, or find them in `toolkit_lm`."""


def shown() -> dict[str, Path]:
    """The modules of the reference, by name, and their pages."""
    return {
        name: page
        for page in PAGES.glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    }


def public_names(module: str) -> list[str]:
    """Names in `__all__`; for a module without one, its own names without an underscore."""
    loaded = importlib.import_module(module)
    if hasattr(loaded, "__all__"):
        return sorted(loaded.__all__)
    return sorted(
        name
        for name, value in vars(loaded).items()
        if name[:1] != "_" and getattr(value, "__module__", None) == module
    )


def fields(value: object) -> list[str]:
    """The class attributes and fields that a class states itself."""
    if not isinstance(value, type):
        return []
    # A typed dictionary forgets its bases and has their fields, too: what it states itself is in
    # its source alone.
    inherited: set[str] = set()
    if is_typeddict(value):
        try:
            source = inspect.getsource(value)
        except OSError:
            # A call has made it, of what is shown elsewhere.
            return []
        body = ast.parse(textwrap.dedent(source)).body[0].body
        inherited = {*value.__annotations__} - {
            one.target.id for one in body if isinstance(one, ast.AnnAssign)
        }
    return [
        name
        for name in vars(value).get("__annotations__", ())
        if name[:1] != "_" and name not in inherited
    ]


def test_every_room_has_a_page():
    modules = {path.stem for path in CORE.glob("*.py") if path.name[0] != "_"}
    rooms = {path.parent.name for path in CORE.glob("*/__init__.py")}
    assert {f"toolkit_lm.{name}" for name in modules | rooms - INTERNAL} <= set(shown())
    overview = (PAGES / "README.md").read_text()
    assert [
        page.name
        for page in PAGES.glob("*.md")
        if page.name != "README.md" and f"({page.name})" not in overview
    ] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built pages: those that `make docs` has just built, where TOOLKIT_SITE names them."""
    if built := os.environ.get("TOOLKIT_SITE"):
        return Path(built)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("module", sorted(shown()))
def test_every_public_name_and_field_is_in_the_built_page(site, module):
    ids = set(
        re.findall(
            r' id="([\w.]+)"', (site / "api" / shown()[module].stem / "index.html").read_text()
        )
    )
    loaded = importlib.import_module(module)
    names = public_names(module)
    assert names
    wanted = [f"{module}.{name}" for name in names]
    # A class that has a second name is shown under its own.
    classes = {
        name: value
        for name in names
        if getattr(value := getattr(loaded, name), "__name__", name) == name
    }
    wanted += [
        f"{module}.{name}.{field}" for name, value in classes.items() for field in fields(value)
    ]
    assert [one for one in wanted if one not in ids] == []
    own = (
        {one for one in ids if one.rpartition(".")[0] == module}
        if hasattr(loaded, "__all__")
        else set()
    )
    assert own - {f"{module}.{name}" for name in names} - set(shown()) == set()
