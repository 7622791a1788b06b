"""Builds what a release publishes, and checks it: no network, nothing is uploaded.

usage: python deploy/release.py [--tag v0.2.0] [--to FOLDER]

It ends with exit code 1 at the first fault. It needs hatchling and packaging.
"""

from __future__ import annotations

import argparse
import os
import re
import tarfile
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

from distributions import ROOT, build, projects
from packaging.metadata import Metadata
from packaging.utils import parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

_URLS = {"Homepage", "Documentation", "Changelog", "Issues"}


class FaultError(Exception):
    """A fault that keeps a release from being published."""


def check_tag(tag: str) -> None:
    """Raises FaultError where the tag is not that of the sources' version, or where the changelog
    lacks it."""
    source = (ROOT / "core/src/toolkit_lm/_version.py").read_text(encoding="utf-8")
    version = re.findall(r'__version__ = "(.+)"', source)[0]
    if tag != f"v{version}":
        raise FaultError(f"the tag is {tag}, and the version of the sources {version}")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"(?m)^## {re.escape(version)} \(", changelog):
        raise FaultError(f"CHANGELOG.md has no section of {version}: run make changelog")
    if left := sorted(path.name for path in (ROOT / "changes").glob("*.*.md")):
        raise FaultError(f"{len(left)} files are left in changes/, such as {left[0]}")


def check_version(files: list[Path]) -> Version:
    """The one version of all files. Raises FaultError where they have several."""
    versions = {
        (parse_wheel_filename if path.suffix == ".whl" else parse_sdist_filename)(path.name)[1]
        for path in files
    }
    if len(versions) != 1:
        raise FaultError(f"the files have the versions {sorted(map(str, versions))}")
    return versions.pop()


def check_metadata(wheel: Path) -> None:
    """Raises FaultError where a wheel's metadata is not valid, or lacks what an index shows."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        content = archive.read(name)
    try:
        found = Metadata.from_email(content, validate=True)
    except ExceptionGroup as error:
        raise FaultError(f"{wheel.name}: {error.exceptions}") from error
    lacking = [
        field
        for field, value in {
            "summary": found.summary,
            "readme": message_from_bytes(content).get_payload(),
            "licence": found.license_expression,
            "licence file": found.license_files,
            "author": found.author,
            "lower bound of Python": found.requires_python,
            "classifiers": found.classifiers,
            "URLs": set(found.project_urls or ()) >= _URLS,
        }.items()
        if not value
    ]
    if found.description_content_type != "text/markdown":
        lacking.append("type of the readme")
    if lacking:
        raise FaultError(f"{wheel.name} lacks its {', '.join(lacking)}")


def check_rebuilt(sdist: Path, wheel: Path, scratch: Path) -> None:
    """Builds a wheel from a source distribution. Raises FaultError where it is another than that of
    the sources."""
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
    rebuilt = build(scratch / sdist.name.removesuffix(".tar.gz"), scratch)
    if rebuilt.name != wheel.name:
        raise FaultError(f"{sdist.name} makes {rebuilt.name}, not {wheel.name}")
    ours, theirs = ({**_content(path)} for path in (wheel, rebuilt))
    if other := sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name)):
        raise FaultError(f"{sdist.name} makes another wheel: {', '.join(other[:5])}")


def _content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def release(target: Path, tag: str | None = None) -> list[Path]:
    """Builds and checks all files. Returns them."""
    if tag is not None:
        check_tag(tag)
    target.mkdir(parents=True, exist_ok=True)
    pairs = [(build(f, target), build(f, target, sdist=True)) for f in projects().values()]
    files = [path for pair in pairs for path in pair]
    version = check_version(files)
    for wheel, sdist in pairs:
        check_metadata(wheel)
        with tempfile.TemporaryDirectory() as scratch:
            check_rebuilt(sdist, wheel, Path(scratch))
    print(f"{len(pairs)} distributions of {version}, as wheels and sources: {target}")
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", help="the release's tag, which must be v and the version")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="folder of the files")
    arguments = parser.parse_args()
    # Equal sources make equal files.
    os.environ.setdefault("SOURCE_DATE_EPOCH", "1580601600")
    try:
        release(arguments.to.resolve(), arguments.tag)
    except FaultError as error:
        raise SystemExit(f"No release: {error}.") from error


if __name__ == "__main__":
    main()
