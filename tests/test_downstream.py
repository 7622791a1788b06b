"""The plugins in downstream/ are pinned: what they must change, all authors are told."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pin import ADVICE, HERE, PAGE, pin, problem, refusal, section, sections
from toolkit_lm import __version__
from toolkit_lm.plugin import API_VERSION

PROJECTS = sorted(HERE.glob("*/pyproject.toml"))


def test_they_are_as_they_were_pinned():
    assert problem(HERE, API_VERSION) is None


def test_the_page_has_a_section_of_each_version_the_newest_first():
    versions = [version for version, _ in sections(PAGE)]
    assert versions[0] == API_VERSION
    numbers = [tuple(map(int, version.split("."))) for version in versions]
    assert numbers == sorted(set(numbers), reverse=True)
    assert all(section(PAGE, version) for version in versions)


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_they_pin_this_version_of_what_they_import(path):
    project = tomllib.loads(path.read_text())["project"]
    needed = [Requirement(one) for one in project["dependencies"]]
    assert "toolkit-lm-core" in {one.name for one in needed}
    for one in needed:
        operators = {each.operator: each.version for each in one.specifier}
        assert operators.keys() == {">=", "<"} and operators[">="] == API_VERSION, str(one)
        assert __version__ in one.specifier


@pytest.fixture
def copied(tmp_path) -> tuple[Path, Path]:
    """A copy of the folder and of the page, pinned."""
    folder = tmp_path / "downstream"
    page = tmp_path / PAGE.name
    shutil.copytree(HERE, folder)
    shutil.copy(PAGE, page)
    # The page may have got rows since.
    (folder / "CONTRACT").write_text(pin(folder, page, API_VERSION))
    assert problem(folder, API_VERSION) is None
    return folder, page


def changed(folder: Path) -> str:
    """Changes a plugin of the folder; its name."""
    path = next(folder.glob("drafter/src/*/drafter.py"))
    path.write_text(path.read_text() + "\nMORE = 1\n")
    return path.relative_to(folder).as_posix()


def test_a_change_without_a_new_version_is_told(copied):
    folder, page = copied
    name = changed(folder)
    told = problem(folder, API_VERSION)
    assert told == f"{name}: changed, and API_VERSION is still {API_VERSION}. {ADVICE}"
    assert refusal(folder, page, API_VERSION) == told


@pytest.mark.parametrize("what", ["added", "removed"])
def test_a_file_that_comes_or_goes_is_a_change(copied, what):
    folder, _ = copied
    if what == "added":
        path = folder / "model" / "tests" / "test_more.py"
        path.write_text("")
    else:
        path = next(folder.glob("route/src/*/routes.py"))
        path.unlink()
    told = problem(folder, API_VERSION)
    assert told is not None and told.startswith(path.relative_to(folder).as_posix())


def test_a_new_version_wants_a_section_and_a_new_pin(copied):
    folder, page = copied
    changed(folder)
    told = problem(folder, "9.9")
    assert told is not None and f"pinned to {API_VERSION}" in told
    assert refusal(folder, page, "9.9") == f"{page.name} has no section 9.9. {ADVICE}"
    page.write_text(page.read_text().replace("\n## ", "\n## 9.9\n\nWrite MORE.\n\n## ", 1))
    assert refusal(folder, page, "9.9") is None
    (folder / "CONTRACT").write_text(pin(folder, page, "9.9"))
    assert problem(folder, "9.9") is None


def test_before_a_release_a_change_needs_only_its_row(copied):
    folder, page = copied
    changed(folder)
    heading = f"\n## {API_VERSION}\n"
    page.write_text(page.read_text().replace(heading, f"{heading}\nMore.\n"))
    assert refusal(folder, page, API_VERSION) is None
