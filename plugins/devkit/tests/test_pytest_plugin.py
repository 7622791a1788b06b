"""Our plugin in pytest, and the fixture `toolkit`."""

from __future__ import annotations

import json
import subprocess
import sys

LOAD = """
import importlib.metadata, json, sys
left_out = sys.argv[1:]
for entry in importlib.metadata.entry_points(group="pytest11"):
    if entry.dist.name not in left_out:
        entry.load()
print(json.dumps(sorted(sys.modules)))
"""


def loaded(*left_out):
    """The modules of a process that loads what pytest finds by entry point, of all distributions
    but some."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *left_out],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def test_without_devkit_pytest_loads_nothing_of_ours():
    assert [name for name in loaded("toolkit-lm-devkit") if name.startswith("toolkit_lm")] == []


def test_with_devkit_it_loads_neither_torch_nor_the_engine():
    modules = loaded()
    assert "toolkit_lm_devkit.pytest_plugin" in modules
    assert {"torch", "numpy", "toolkit_lm.engine", "toolkit_lm_cli"}.isdisjoint(modules)


def test_the_fixture_gives_code_and_both_streams(toolkit):
    assert toolkit("plugins", "list", "--json").code == 0
    done = toolkit("plugins", "list", "--plugins", "none-such")
    assert (done.code, done.out) == (1, "")
    assert "none-such" in done.err
