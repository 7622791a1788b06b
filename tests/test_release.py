"""What a user installs and a release publishes: `make demo`, wheels and source distributions, and
the workflow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from test_workspace import FOLDERS, ROOT, project
from toolkit_lm import __version__

sys.path.insert(0, str(ROOT / "deploy"))
try:
    import distributions
    import release
finally:
    sys.path.remove(str(ROOT / "deploy"))

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
HEAVY = {"ray", "mkdocs", "xformers", "mypy", "playwright", "peft", "triton", "matplotlib"}
"""Packages of developers, which a user does not install."""


def commands(target: str, venv: Path) -> str:
    """The commands that make would run, in an environment that is not there."""
    words = ["make", "--dry-run", target, f"VENV={venv}"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_demo_installs_what_a_user_does(tmp_path):
    """Wheels of one build; the workspace, editable, is for developers."""
    found = commands("demo", tmp_path / "venv")
    stages = [line.split()[1] for line in found.splitlines() if line.startswith('echo "')]
    assert stages == ['"1/4', '"2/4', '"3/4', '"4/4']
    assert found.count("deploy/distributions.py") == 1 and "--of toolkit-lm" in found
    assert "requirements-dev.txt" not in found and " -e " not in found
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".installed").touch()
    assert "build/wheels" not in commands("demo", tmp_path / "venv")


def test_all_are_built_and_a_user_needs_no_tools_of_developers():
    folders = distributions.projects()
    assert set(folders.values()) == {ROOT, *FOLDERS}
    needed = distributions.needed(["toolkit-lm"], folders)
    assert {"toolkit-lm", "toolkit-lm-core", "toolkit-lm-server", "toolkit-lm-cpu"} <= set(needed)
    assert "toolkit-lm-executor-ray" not in needed and "toolkit-lm-xformers" not in needed
    wanted = {word for name in needed for word in project(folders[name])["dependencies"]}
    assert not HEAVY & {word.partition(">")[0] for word in wanted}


def test_a_name_that_is_none_is_refused(tmp_path):
    command = [sys.executable, ROOT / "deploy" / "distributions.py", "--to", tmp_path, "--of", "x"]
    found = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert found.returncode == 2 and "no distribution 'x'. There are: toolkit-lm," in found.stderr


def test_one_version_comes_from_one_place():
    for folder in (ROOT, *FOLDERS):
        data = tomllib.loads((folder / "pyproject.toml").read_text())
        path = data["tool"]["hatch"]["version"]["path"]
        assert (folder / path).resolve() == ROOT / "core/src/toolkit_lm/_version.py", folder


@pytest.fixture
def checked(monkeypatch, tmp_path) -> ModuleType:
    """`release`, for the sources of a folder: a version and a changelog."""
    version = tmp_path / "core" / "src" / "toolkit_lm" / "_version.py"
    version.parent.mkdir(parents=True)
    version.write_text('__version__ = "1.2.0"\n')
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "README.md").touch()
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (2026-01-31)\n\n- ...\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    return release


def test_a_tag_is_that_of_a_finished_version(checked, tmp_path):
    checked.check_tag("v1.2.0")
    with pytest.raises(checked.FaultError, match=r"the tag is v1\.3\.0, and .* 1\.2\.0"):
        checked.check_tag("v1.3.0")
    (tmp_path / "changes" / "news.added.md").write_text("News.")
    with pytest.raises(checked.FaultError, match=r"1 files are left in changes/, such as news"):
        checked.check_tag("v1.2.0")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased: 1.2.0\n")
    with pytest.raises(checked.FaultError, match=r"no section of 1\.2\.0: run make changelog"):
        checked.check_tag("v1.2.0")


@pytest.mark.parametrize("name", ["toolkit-lm", "toolkit-lm-commands"])
def test_a_source_distribution_makes_the_wheel_of_the_sources(tmp_path, name):
    """A meta-distribution, and one whose version lies outside of its folder."""
    folder = distributions.projects()[name]
    wheel = distributions.build(folder, tmp_path)
    sdist = distributions.build(folder, tmp_path, sdist=True)
    release.check_metadata(wheel)
    release.check_rebuilt(sdist, wheel, tmp_path / "scratch")
    assert str(release.check_version([wheel, sdist])) == __version__
    other = tmp_path / sdist.name.replace(__version__, "9.9")
    shutil.copy(sdist, other)
    with pytest.raises(release.FaultError, match="the files have the versions"):
        release.check_version([wheel, other])


def test_metadata_that_lacks_something_is_named(tmp_path):
    shutil.copytree(ROOT / "libs" / "serving", tmp_path / "libs" / "serving")
    made = tmp_path / "core" / "src" / "toolkit_lm" / "_version.py"
    made.parent.mkdir(parents=True)
    made.write_text('__version__ = "1.0"')
    path = tmp_path / "libs" / "serving" / "pyproject.toml"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(("readme", "Issues"))))
    wheel = distributions.build(path.parent, tmp_path)
    with pytest.raises(release.FaultError, match="lacks its readme, URLs, type of the readme"):
        release.check_metadata(wheel)


def steps() -> list[dict]:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_the_workflow_fits_its_schema_and_keeps_no_token():
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", WORKFLOW]
    found = subprocess.run(
        list(map(str, [sys.executable, *command])), capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stdout
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in WORKFLOW.read_text() and jobs["publish"]["needs"] == "build"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_steps_of_the_workflow_run(tmp_path):
    """In a clean checkout: all wheels and source distributions, built and checked, without a tag.
    What installs tools is left out: this environment has them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    run = [step["run"] for step in steps() if "run" in step]
    assert [step.startswith("python -m pip install ") for step in run] == [True, False]
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_REF_TYPE": "branch",
        "GITHUB_REF_NAME": "main",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", run[1]],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    made = sorted((tmp_path / "dist").iterdir())
    assert len(made) == 2 * (len(FOLDERS) + 1)
    assert sum(path.suffix == ".whl" for path in made) == len(FOLDERS) + 1
