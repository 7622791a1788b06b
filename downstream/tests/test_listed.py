"""toolkit finds all of them, finds them whole, and sees public names alone in them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

PROJECTS = [
    tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    for path in sorted(Path(__file__).parents[1].glob("*/pyproject.toml"))
]
NAMES = [project["name"] for project in PROJECTS]


def test_they_are_listed_and_none_is_broken(toolkit):
    listed = json.loads(toolkit("plugins", "list", "--json").out)
    states = {one["distribution"]: one["status"] for one in listed}
    assert len(NAMES) == 5
    assert {name: states.get(name) for name in NAMES} == dict.fromkeys(NAMES, "ok")


@pytest.mark.parametrize("name", NAMES)
def test_they_pass_the_check(toolkit, name):
    """Private names, a missing pin, heavy imports, targets that are none: all are problems."""
    done = toolkit("plugins", "check", name, "--json")
    report = json.loads(done.out)
    assert (done.code, report["problems"]) == (0, [])
