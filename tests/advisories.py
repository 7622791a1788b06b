"""Known vulnerabilities of dependencies.

usage: python tests/advisories.py [--look-up]

Without an option, offline: the table below against what distributions require, constraints.txt pins
and the environment has. It knows no more than what was written into it. With --look-up, pip-audit
asks PyPI about everything that is installed. Exit code 1: a vulnerable version may be or is in use.
Exit code 2: pip-audit could not look up everything.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


class Advisory(NamedTuple):
    package: str
    fixed: str
    """The first version without it."""
    id: str


ADVISORIES = (
    Advisory("aiohttp", "3.14.3", "CVE-2026-69244"),
    Advisory("fastapi", "0.109.1", "CVE-2024-24762"),
    Advisory("h11", "0.16.0", "CVE-2025-43859"),
    Advisory("jinja2", "3.1.6", "CVE-2025-27516"),
    Advisory("pydantic", "2.4.0", "CVE-2024-3772"),
    Advisory("pyyaml", "5.4", "CVE-2020-14343"),
    Advisory("starlette", "0.49.1", "CVE-2025-62727"),
    Advisory("starlette", "1.0.1", "CVE-2026-48710"),
    Advisory("starlette", "1.3.1", "CVE-2026-54283"),
    Advisory("torch", "2.6.0", "CVE-2025-32434"),
    Advisory("torch", "2.10.0", "GHSA-63cw-57p8-fm3p"),
    Advisory("transformers", "5.3.0", "CVE-2026-4372"),
    Advisory("uvicorn", "0.11.7", "CVE-2020-7694"),
)
"""Advisories on packages that a distribution requires."""


def requirements(root: Path) -> Iterator[tuple[str, Requirement]]:
    """Requirements of each distribution, optional or not, with the file that states them."""
    for file in sorted(
        {
            root / "pyproject.toml",
            *root.glob("core/pyproject.toml"),
            *root.glob("*/*/pyproject.toml"),
        }
    ):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        for text in chain(
            project.get("dependencies", []), *project.get("optional-dependencies", {}).values()
        ):
            yield str(file.relative_to(root)), Requirement(text)
    for line in (root / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            yield "constraints.txt", Requirement(line)


def lowest(requirement: Requirement) -> Version | None:
    """The lowest version that it allows; None where any is allowed."""
    return max(
        (
            Version(one.version)
            for one in requirement.specifier
            if one.operator in (">=", "==", "~=")
        ),
        default=None,
    )


def problems(advisories: Iterable[Advisory], root: Path = ROOT) -> list[str]:
    """Places where a vulnerable version is allowed or installed."""
    found = []
    required = [(file, one, canonicalize_name(one.name)) for file, one in requirements(root)]
    for package, fixed, name in advisories:
        told = f"{package} has {name} before {fixed}"
        given = [(file, one) for file, one, required_name in required if required_name == package]
        if not any(file != "constraints.txt" for file, _ in given):
            found.append(
                f"{told}, but no distribution requires {package}: take it out of the table."
            )
        found += [
            f"{told}: {file} allows {least or 'any version'}. Require at least {fixed}."
            for file, one in given
            if (least := lowest(one)) is None or least < Version(fixed)
        ]
        if (installed := _installed(package)) is not None and installed < Version(fixed):
            found.append(f"{told}: {installed} is installed.")
    return found


def _installed(package: str) -> Version | None:
    try:
        return Version(version(package))
    except PackageNotFoundError:
        return None


def look_up() -> int:
    """Runs pip-audit, whose own exit code is 0 where it found nothing because it could ask
    nobody."""
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--format",
        "json",
        "--progress-spinner",
        "off",
        "--skip-editable",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(f"Nothing was looked up. pip-audit failed:\n{done.stderr.strip()[-1000:]}")
        return 2
    return report(packages)


def report(packages: list[dict[str, Any]]) -> int:
    """Prints what pip-audit has said of each package, and returns the exit code."""
    # Our own distributions are editable, and have no entry anywhere.
    skipped = {
        one["name"]: one["skip_reason"]
        for one in packages
        if "skip_reason" in one and "editable" not in one["skip_reason"]
    }
    known = [one for one in packages if "skip_reason" not in one]
    vulnerable = [(one, vulnerability) for one in known for vulnerability in one["vulns"]]
    for one, vulnerability in vulnerable:
        fixes = ", ".join(vulnerability["fix_versions"]) or "no version"
        print(f"{one['name']} {one['version']} has {vulnerability['id']}; fixed in {fixes}")
    print(f"{len(known)} packages were looked up, {len(vulnerable)} vulnerabilities found.")
    if skipped:
        name, reason = next(iter(skipped.items()))
        print(
            f"{len(skipped)} packages could NOT be looked up: nothing is known of them. The "
            f"first, {name}: {reason}"
        )
    if vulnerable:
        return 1
    return 2 if skipped or not known else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--look-up", action="store_true")
    if parser.parse_args().look_up:
        return look_up()
    found = problems(ADVISORIES)
    print(
        "\n".join(found) or f"{len(ADVISORIES)} known advisories: no vulnerable version is allowed"
    )
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
