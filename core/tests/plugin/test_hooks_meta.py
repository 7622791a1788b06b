"""Every hook, of core and of the installed plugins, has a test, and a page with its exact signature
and an example that works."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path

import pytest
from toolkit_lm.plugin import Plugins

ROOT = Path(__file__).parents[3]
PLUGINS = Plugins.load()
HOOKS = sorted(name for name in vars(PLUGINS.hook) if name.startswith("toolkit_"))


def signature(hook: str) -> str:
    """A hook's signature as its specification states it."""
    function = getattr(PLUGINS.hook, hook).spec.function
    return f"{hook}{inspect.signature(function)}".replace("'", "")


def page(hook: str) -> Path:
    return ROOT / "docs" / "hooks" / f"{hook}.md"


@pytest.fixture(scope="module")
def test_texts():
    """The text of every test file of the repository."""
    folders = [
        ROOT / "core" / "tests",
        ROOT / "tests",
        *ROOT.glob("libs/*/tests"),
        *ROOT.glob("plugins/*/tests"),
        *ROOT.glob("contrib_*/*/tests"),
    ]
    return "".join(
        path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("test_*.py")
    )


def test_the_hooks_are_these():
    assert len(HOOKS) >= 8
    assert {info.status for info in PLUGINS.infos} == {"ok"}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_has_a_test(hook, test_texts):
    assert re.search(rf"def test_{hook}(_\w+)?\(", test_texts), f"write a test named test_{hook}"


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_has_a_page_with_its_signature(hook):
    assert page(hook).exists(), f"write {page(hook).relative_to(ROOT)}"
    assert f"```python\n{signature(hook)}\n```" in page(hook).read_text(encoding="utf-8")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_says_who_calls_it(hook):
    """In its own docstring, or in the module's, for what hooks have in common."""
    function = getattr(PLUGINS.hook, hook).spec.function
    text = f"{inspect.getdoc(function)} {inspect.getdoc(inspect.getmodule(function))}"
    assert all(f"{word}:" in text for word in ("Caller", "Process", "Thread", "Return")), text


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_on_a_hooks_page_is_a_plugin_that_implements_it(hook, monkeypatch):
    blocks = page(hook).read_text(encoding="utf-8").split("```python\n")
    module = types.ModuleType(f"{hook}_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(blocks[2].split("```")[0], module.__dict__)
    plugins = Plugins.load(extra=[module])
    assert hook in plugins.info(module.__name__).hooks


def test_every_page_is_of_a_hook():
    names = {path.stem for path in (ROOT / "docs" / "hooks").glob("toolkit_*.md")}
    assert names <= set(HOOKS), "these hooks exist no more"
