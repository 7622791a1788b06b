"""The fragments of CHANGELOG.md in changes/: well formed, and all of them in the next release's
section."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from towncrier.build import _main as build

ROOT = Path(__file__).parents[1]
TYPES = [
    one["directory"]
    for one in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
]
NO_FRAGMENTS = ("README.md", "template.md.jinja")
WIDTH = 140


def problems(folder: Path) -> list[str]:
    """Faults of the files in a folder of fragments, with the files' names."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.name in NO_FRAGMENTS:
            continue
        text = path.read_text(encoding="utf-8")
        if not re.fullmatch(rf"[a-z0-9]+(-[a-z0-9]+)*\.({'|'.join(TYPES)})\.md", path.name):
            found.append(f"{path.name} is not NAME.TYPE.md; types: {', '.join(TYPES)}")
        elif not text.strip() or not text.endswith("\n") or "\n\n" in text:
            found.append(f"{path.name} is not one paragraph that ends with its line")
        elif text.startswith(("-", "*  ", "* ", "#")):
            found.append(f"{path.name} is a list or heading, and becomes an item of a list itself")
        elif any(len(line) > WIDTH for line in text.splitlines()):
            found.append(f"{path.name} has a line of more than {WIDTH} characters")
    return found


def section(root: Path) -> str:
    """The next release's section. Raises AssertionError with what towncrier says."""
    result = CliRunner().invoke(build, ["--draft", "--version", "next", "--dir", str(root)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_all_fragments_are_well_formed():
    assert problems(ROOT / "changes") == []


def test_the_section_of_the_next_release_has_all_fragments():
    found = " ".join(section(ROOT).split())
    for path in (ROOT / "changes").iterdir():
        if path.name not in NO_FRAGMENTS:
            assert f"- {' '.join(path.read_text(encoding='utf-8').split())}" in found, path.name


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("new-thing.added.md", "A new thing.\n", None),
        ("new_thing.added.md", "A new thing.\n", "NAME.TYPE.md"),
        ("new-thing.feature.md", "A new thing.\n", "added, changed, fixed, removed, contract"),
        ("new-thing.added.txt", "A new thing.\n", "NAME.TYPE.md"),
        ("new-thing.md", "A new thing.\n", "NAME.TYPE.md"),
        ("new-thing.added.md", "\n", "one paragraph"),
        ("new-thing.added.md", "A new thing.", "one paragraph"),
        ("new-thing.added.md", "A new thing.\n\nAnd another.\n", "one paragraph"),
        ("new-thing.added.md", "- A new thing.\n", "a list"),
        ("new-thing.added.md", f"A {'very ' * 30}new thing.\n", "140 characters"),
    ],
)
def test_what_is_wrong_with_a_fragment_is_told(tmp_path, name, text, fault):
    (tmp_path / name).write_text(text)
    found = problems(tmp_path)
    assert found == [] if fault is None else name in found[0] and fault in found[0]


def test_a_release_has_a_section_below_the_top_of_the_changelog(tmp_path):
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "changes").mkdir()
    shutil.copy(ROOT / "changes/template.md.jinja", tmp_path / "changes")
    for name in ("b.fixed.md", "a.fixed.md", "c.added.md"):
        (tmp_path / "changes" / name).write_text(f"{name}\nin two lines.\n")
    before, _, after = (ROOT / "CHANGELOG.md").read_text().partition("<!-- releases -->\n")
    arguments = ["--keep", "--version", "0.2.0", "--date", "2030-01-02", "--dir", str(tmp_path)]
    result = CliRunner().invoke(build, arguments)
    assert result.exit_code == 0, result.output
    new = """
## 0.2.0 (2030-01-02)

### Added

- c.added.md
  in two lines.

### Fixed

- a.fixed.md
  in two lines.
- b.fixed.md
  in two lines.

"""
    told = (tmp_path / "CHANGELOG.md").read_text()
    assert told == f"{before}<!-- releases -->\n{new}{after.lstrip()}"
