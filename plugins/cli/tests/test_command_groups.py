"""Commands with names of several words: groups that plugins share, without importing a command
before it is invoked."""

from __future__ import annotations

import sys
import types

import pytest
import typer
from toolkit_lm.config import PluginsConfig
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm_cli import hookspecs


class First:
    name = "first"

    @hookimpl
    def toolkit_register_commands(self, commands):
        commands.add("tool one", "tool_one:run", help="The first tool.")
        commands.add("tool deep down", "tool_down:app", help="Deep down.")


class Second:
    name = "second"

    @hookimpl
    def toolkit_register_commands(self, commands):
        commands.add("tool two", "tool_two:run", help="The second tool.")


def run(count: int = 1) -> None:
    """What it does."""
    print("ran", count)


@pytest.fixture
def group(toolkit, monkeypatch):
    """Runs `toolkit` with core and plugins from code."""
    load = Plugins.load

    def call(*arguments, plugins=(First, Second)):
        loaded = load(
            PluginsConfig(plugins=[]), extra=[hookspecs, *(plugin() for plugin in plugins)]
        )
        monkeypatch.setattr(Plugins, "load", lambda *_: loaded)
        return toolkit(*arguments)

    return call


@pytest.fixture
def install(monkeypatch):
    """Makes the module of a command importable."""

    def make(name, **names):
        module = types.ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)

    return make


def test_a_group_is_one_line_of_the_help(group):
    shown = group("--help").out
    assert "Commands: deep, one, two." in shown
    assert "The first tool." not in shown
    assert "Commands: deep, one." in group("--help", plugins=[First]).out


def test_a_group_lists_its_children_and_imports_none(group):
    """No module of these commands exists."""
    shown = group("tool", "--help")
    assert shown.code == 0
    for part in ("toolkit tool", "The first tool.", "The second tool.", "Commands: down."):
        assert part in shown.out
    assert "Deep down." in group("tool", "deep", "--help").out
    assert "The second tool." in "".join(group("tool")[1:])


def test_only_what_is_invoked_is_imported(group, install):
    install("tool_two", run=run)
    assert group("tool", "two", "--count", "3").out == "ran 3\n"
    done = group("tool", "one")
    assert done.code == 1
    assert (
        "failed in loading command 'tool one' from 'tool_one:run': ModuleNotFoundError" in done.err
    )


def test_groups_nest_and_end_in_a_typer_app(group, install):
    target = typer.Typer(add_completion=False)
    target.command("a")(run)
    target.command("b")(lambda: print("b"))
    install("tool_down", app=target)
    assert group("tool", "deep", "down", "b").out == "b\n"
    assert "Usage: toolkit tool deep down a" in group("tool", "deep", "down", "a", "--help").out


def test_an_unknown_command_of_a_group_names_the_known_ones(group):
    done = group("tool", "zzz")
    assert (done.code, done.out) == (2, "")
    expected = "no such command 'zzz'. Known: deep, one, two. See `toolkit tool --help`."
    assert done.err == f"error: {expected}\n"
    assert "no such command 'tow'. Did you mean 'two'?" in group("tool", "tow").err
    assert "Did you mean 'tool'?" in group("tol").err
