"""Flags as other projects name them: a plugin's translator sees the words after a command."""

from __future__ import annotations

import sys
import types

from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm_cli.app import run
from toolkit_lm_commands import FlagNamesRegistry

seen = []


def translate_flags(words, known):
    seen.append({"--json", "--ours"} & {*known})
    return ["--json" if word == "--as-json" else word for word in words]


class Mine:
    name = "mine"

    @hookimpl
    def toolkit_register_flag_names(self, flag_names):
        flag_names.add("mine", "flags_of_mine:translate_flags")


def test_toolkit_register_flag_names(monkeypatch, capsys):
    module = types.ModuleType("flags_of_mine")
    module.translate_flags = translate_flags
    monkeypatch.setitem(sys.modules, module.__name__, module)
    plugins = Plugins.load(extra=[Mine()])
    assert "mine" in plugins.brought_registry(FlagNamesRegistry)
    monkeypatch.setattr("toolkit_lm_cli.app._load", lambda config: plugins)
    assert run(["plugins", "list", "--as-json"]) == 0
    assert capsys.readouterr().out.startswith("[") and seen == [{"--json"}]
    # Words without a flag are nobody's.
    assert run(["plugins", "list"]) == 0 and len(seen) == 1
