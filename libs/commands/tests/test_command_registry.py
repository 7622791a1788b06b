"""The registry of commands: groups, names, and the example on the page of its hook."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
from toolkit_lm.config import PluginsConfig
from toolkit_lm.errors import PluginError
from toolkit_lm.plugin import PluginInfo, Plugins
from toolkit_lm_commands import CommandRegistry

ONE = PluginInfo("one", "dist-one", "1.0", "/somewhere/one.py")
TWO = PluginInfo("two", "dist-two", "2.0")
PAGE = Path(__file__).parents[3] / "docs" / "hooks" / "toolkit_register_commands.md"


def test_toolkit_register_commands():
    example = types.ModuleType("commands_example")
    exec(PAGE.read_text(encoding="utf-8").split("```python\n")[2].split("```")[0], example.__dict__)
    commands = Plugins.load(PluginsConfig(plugins=["cli"]), extra=[example]).brought_registry(
        CommandRegistry
    )
    assert commands.get("measure").help == "Measure a model."
    assert commands.children("compare") == {"runs": "Compare two measurements."}


def test_commands_of_several_words_make_groups():
    commands = CommandRegistry(owner=ONE)
    commands.add("tools one", "a:b", help="One.")
    commands.add("go", "a:b", help="Go.")
    commands.owner = TWO
    commands.add("tools two", "a:b", help="Two.")
    commands.add("toolsmith", "a:b", help="Another.")
    assert commands.children() == {
        "go": "Go.",
        "tools": "Commands: one, two.",
        "toolsmith": "Another.",
    }
    assert commands.children("tools") == {"one": "One.", "two": "Two."}
    assert commands.children("go") == commands.children("tool") == {}


@pytest.mark.parametrize(
    ("first", "second"),
    [("tools", "tools one"), ("tools one", "tools"), ("tools one", "tools one more")],
)
@pytest.mark.parametrize("override", [False, True])
def test_a_command_and_a_group_do_not_share_a_name(first, second, override):
    commands = CommandRegistry(owner=ONE)
    commands.add(first, "a:b", help="First.")
    commands.owner = TWO
    shared = min(first, second, key=len)
    with pytest.raises(
        PluginError,
        match=rf"'{second}' of plugin 'two' .*'{first}' of plugin 'one' .*'{shared}' cannot be "
        r"both",
    ):
        commands.add(second, "a:b", help="Second.", override=override)
    assert commands.keys() == [first]


@pytest.mark.parametrize("name", ["tools  one", " tools", "tools ", "tools\tone", "", None, 3])
def test_a_malformed_name_of_a_command_is_refused(name):
    with pytest.raises(PluginError, match=r"'one' .*a command needs a name"):
        CommandRegistry(owner=ONE).add(name, "a:b", help="One.")
