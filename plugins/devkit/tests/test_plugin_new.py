"""`toolkit plugins new`: what it writes, and what it refuses. That it installs and passes its tests
is shown in tests/."""

from __future__ import annotations

import tomllib

import pytest
from toolkit_lm.plugin import API_VERSION
from toolkit_lm_devkit.cli.new import Kind


@pytest.mark.parametrize("kind", Kind)
def test_a_whole_distribution(toolkit, tmp_path, kind):
    done = toolkit("plugins", "new", kind, "my-thing", "--dir", tmp_path)
    assert (done.code, done.err) == (0, "")
    home = tmp_path / "toolkit-lm-my-thing"
    assert f"cd {home}" in done.out
    project = tomllib.loads((home / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["toolkit_lm"] == {"my-thing": "toolkit_lm_my_thing"}
    others = {
        Kind.ATTENTION_BACKEND: ["toolkit-lm-paged-attention"],
        Kind.COMMAND: ["toolkit-lm-cli", "toolkit-lm-commands"],
        Kind.MODEL: ["toolkit-lm-rotary"],
    }
    wanted = ["toolkit-lm-core", *others.get(kind, [])]
    assert [
        dependency.partition(f">={API_VERSION},<")[0] for dependency in project["dependencies"]
    ] == wanted
    files = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    assert {
        "README.md",
        "pyproject.toml",
        "src/toolkit_lm_my_thing/__init__.py",
        "src/toolkit_lm_my_thing/py.typed",
    } < files
    # Named after the plugin: two plugins' tests may be run together.
    assert [
        file.startswith("tests/test_my_thing_") for file in files if file.startswith("tests/")
    ] == [True]
    for file in files:
        if file.endswith(".py"):
            compile((home / file).read_text(), file, "exec")
    assert not any(
        "$" in (home / file).read_text() for file in files if not file.endswith("model.py")
    )


def test_what_is_there_is_not_overwritten(toolkit, tmp_path):
    (tmp_path / "toolkit-lm-mine").mkdir()
    done = toolkit("plugins", "new", "model", "mine", "--dir", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "exists already" in done.err


@pytest.mark.parametrize("name", ["My", "my_model", "1st", "a--b", "-a", "a/b", ""])
def test_a_bad_name(toolkit, tmp_path, name):
    done = toolkit("plugins", "new", "--dir", tmp_path, "model", "--", name)
    assert done.code == 2
    assert "is not a name for a plugin" in done.err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind(toolkit):
    done = toolkit("plugins", "new", "modle", "mine")
    assert done.code == 2
    assert "'modle'" in done.err


def test_without_this_plugin_it_is_an_unknown_command(toolkit):
    for command in ("new", "check"):
        assert command in toolkit("plugins", "--help").out
        done = toolkit("--disable-plugins", "devkit", "plugins", command)
        assert (done.code, done.out) == (2, "")
        assert f"no such command '{command}'. Known: api, list, show." in done.err
