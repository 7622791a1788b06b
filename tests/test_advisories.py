"""The table of known vulnerabilities, and what is said of a look-up that could not ask anybody."""

from __future__ import annotations

import pytest
from advisories import ADVISORIES, Advisory, problems, report

PROJECT = '[project]\nname = "a"\ndependencies = ["h11{floor}"]\n'


def test_no_vulnerable_version_is_allowed():
    assert problems(ADVISORIES) == []


@pytest.mark.parametrize(
    ("floor", "wrong"),
    [(">=0.14", "allows 0.14"), ("", "allows any version"), (">=0.16", None), ("~=0.17", None)],
)
def test_floors(tmp_path, floor, wrong):
    (tmp_path / "pyproject.toml").write_text(PROJECT.format(floor=floor))
    (tmp_path / "constraints.txt").write_text("# pins\nh11==0.16.0\n")
    found = problems([Advisory("h11", "0.16.0", "CVE-2025-43859")], tmp_path)
    assert found == (
        []
        if wrong is None
        else [
            (
                f"h11 has CVE-2025-43859 before 0.16.0: pyproject.toml {wrong}. Require at least "
                "0.16.0."
            )
        ]
    )


def test_pins_installed_versions_and_packages_that_nobody_requires(tmp_path):
    (tmp_path / "pyproject.toml").write_text(PROJECT.format(floor=">=999"))
    (tmp_path / "constraints.txt").write_text("h11==0.14.0\n")
    pinned, installed = problems([Advisory("h11", "999", "CVE-1")], tmp_path)
    assert "constraints.txt allows 0.14.0" in pinned and "is installed" in installed
    [unused] = problems([Advisory("no-such-package", "1", "CVE-1")], tmp_path)
    assert "take it out of the table" in unused


CLEAN = {"name": "a", "version": "1", "vulns": []}
VULNERABLE = {"name": "b", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found on PyPI"}
EDITABLE = {"name": "d", "skip_reason": "distribution marked as editable"}


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        ([CLEAN, EDITABLE], 0, "1 packages were looked up, 0 vulnerabilities"),
        ([CLEAN, VULNERABLE], 1, "b 1 has CVE-1; fixed in 2"),
        (
            [CLEAN, SKIPPED],
            2,
            "1 packages could NOT be looked up: nothing is known of them. The first, c",
        ),
        ([VULNERABLE, SKIPPED], 1, "could NOT"),
        ([], 2, "0 packages were looked up"),
    ],
)
def test_what_could_not_be_looked_up_is_no_success(capsys, packages, code, said):
    assert report(packages) == code
    assert said in capsys.readouterr().out
