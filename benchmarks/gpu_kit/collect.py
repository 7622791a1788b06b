"""Collects what a machine with a card and without a network lacks, into one folder. `make gpu-kit`
calls it.

usage: python -m gpu_kit.collect [--to FOLDER] [--python312 PYTHON]

The folder has wheels/ (what our distributions need and there.txt does not have), metadata/ (the
dist-info folders of our distributions), sources.tar.gz, and kit.sh, which unpacks the sources and
runs them. Nothing is built there.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import chdir
from email import message_from_string
from pathlib import Path
from typing import IO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpu_kit.jobs import COMMIT, ROOT
from gpu_kit.needs import OURS, Found, Lack, lacking

MOST_BYTES = 20 << 20
PLATFORMS = (
    *(f"manylinux_2_{minor}" for minor in range(39, 4, -1)),
    "manylinux2014",
    "manylinux2010",
    "manylinux1",
)
"""pip takes the very platforms that it is told, and not older ones: all up to the machine's glibc,
which is 2.39."""
TARGET = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.12.3",
    "python_version": "3.12",
    "sys_platform": "linux",
}
"""Markers of the machine."""
FOLDERS = ("core", "libs", "plugins", "contrib_models", "contrib_backends", "tests", "benchmarks")
FILES = ("conftest.py", "pyproject.toml", "requirements-dev.txt")
LEFT_OUT = (
    "checkpoint_tools/",
    "checkpoint_vision/",
    "checkpoint_dates/",
    "tests/clients/",
    ".png",
    "json_schema_test_suite.json",
)
"""Large, and of no use there: the kit asks `tiny` alone."""
SCRIPT = """#!/usr/bin/env bash
# Unpacks the kit beside itself, and runs it: bash kit.sh [--seconds 480] [--out FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$here/tree"
tar xzf "$here/sources.tar.gz" -C "$here/tree"
exec bash "$here/tree/benchmarks/gpu_kit.sh" --kit "$here" "$@"
"""


def there(file: Path = Path(__file__).with_name("there.txt")) -> dict[str, Found]:
    """The list of what the machine has, by canonical name."""
    lines = (
        line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()
    )
    found = {}
    for line in filter(None, lines):
        name, _, version = line.partition("==")
        found[canonicalize_name(name)] = Found(version or None)
    return found


def write_metadata(folder: Path) -> dict[str, Found]:
    """The dist-info folders of our distributions as their pyproject.toml files have them, and what
    they say."""
    import hatchling.build

    found = {}
    folder.mkdir(parents=True)
    for project in (
        ROOT,
        *sorted(ROOT.glob("core")),
        *sorted(ROOT.glob("libs/*")),
        *sorted(ROOT.glob("plugins/*")),
        *sorted(ROOT.glob("contrib_*/*")),
    ):
        if (project / "pyproject.toml").exists():
            with chdir(project):
                made = folder / hatchling.build.prepare_metadata_for_build_wheel(str(folder))
            # The metadata that a build asks for first has none, and without them nothing is a
            # plugin.
            (made / "entry_points.txt").write_text(
                entry_points(project / "pyproject.toml"), encoding="utf-8"
            )
            name, one = _read((made / "METADATA").read_text(encoding="utf-8"))
            found[name] = one
    return found


def entry_points(pyproject: Path) -> str:
    """The entry points of a distribution, as its entry_points.txt has them."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    groups = {**project.get("entry-points", {}), "console_scripts": project.get("scripts", {})}
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), ""]
    return "\n".join(lines)


def wheel_metadata(folder: Path) -> dict[str, Found]:
    """The metadata of the wheels in a folder, by canonical name."""
    found = {}
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            member = next(
                one
                for one in archive.namelist()
                if one.count("/") == 1 and one.endswith(".dist-info/METADATA")
            )
            name, one = _read(archive.read(member).decode())
            found[name] = one
    return found


def _read(text: str) -> tuple[str, Found]:
    message = message_from_string(text)
    return canonicalize_name(message["Name"]), Found(
        message["Version"], tuple(message.get_all("Requires-Dist") or ())
    )


def pinned(requirement: Requirement) -> str:
    """At the version that constraints.txt has, where it has one."""
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, equals, version = line.partition("==")
        if (
            equals
            and canonicalize_name(name) == canonicalize_name(requirement.name)
            and requirement.specifier.contains(version)
        ):
            return f"{name}=={version}"
    return f"{requirement.name}{requirement.specifier}"


def download(ours: Mapping[str, Found], present: Mapping[str, Found], wheels: Path) -> None:
    """Wheels of all that is lacking, until nothing is."""
    wheels.mkdir()
    asked: set[str] = set()
    while lacks := still_lacking(ours, present, wheels):
        wanted = sorted(pinned(lack.requirement) for lack in lacks)
        if again := asked.intersection(wanted):
            raise SystemExit(
                f"these wheels do not do: {', '.join(again)}. " + "; ".join(map(str, lacks))
            )
        asked.update(wanted)
        for lack in lacks:
            if canonicalize_name(lack.requirement.name).startswith(OURS):
                raise SystemExit(str(lack))
            if lack.requirement.name in present:
                raise SystemExit(
                    f"{lack}. A distribution that is there is not carried: widen the "
                    "requirement, or change there.txt."
                )
        pip("download", "--no-deps", *_for_the_machine(), "--dest", str(wheels), *wanted)


def still_lacking(
    ours: Mapping[str, Found], present: Mapping[str, Found], wheels: Path
) -> list[Lack]:
    """Requirements that neither the machine, nor our distributions, nor the wheels meet."""
    known = {**present, **wheel_metadata(wheels), **ours}
    return lacking(known.get, environment=TARGET)


def _for_the_machine() -> Iterator[str]:
    yield from ("--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp")
    for platform in PLATFORMS:
        yield from ("--platform", f"{platform}_x86_64")


def pip(*arguments: str, python: str = sys.executable) -> None:
    # Constraints of this machine say nothing of another one.
    environ = {**os.environ, "PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [python, "-m", "pip", *arguments, "--quiet"], capture_output=True, text=True, env=environ
    )
    if done.returncode:
        raise SystemExit(f"pip {arguments[0]} failed:\n{done.stderr.strip()}")


def write_sources(file: Path) -> None:
    """Packs the sources and tests that git has: the same bytes for the same files."""
    changes = " and changes" if git("status", "--porcelain") else ""
    commit = f"{git('rev-parse', 'HEAD').strip()}{changes}\n".encode()
    with tempfile.TemporaryFile() as raw:
        with tarfile.open(fileobj=raw, mode="w") as archive:
            for name in sorted(git("ls-files", *FOLDERS, *FILES).splitlines()):
                if not any(one in name for one in LEFT_OUT) and (ROOT / name).is_file():
                    archive.add(ROOT / name, name, filter=_plain)
            written = tarfile.TarInfo(COMMIT)
            written.size = len(commit)
            archive.addfile(written, io.BytesIO(commit))
        raw.seek(0)
        _compress(raw, file)


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _compress(raw: IO[bytes], file: Path) -> None:
    with file.open("wb") as out, gzip.GzipFile("", "wb", 9, out, mtime=0) as packed:
        shutil.copyfileobj(raw, packed)


def check_install(wheels: Path, present: Mapping[str, Found], python312: str | None) -> str:
    """Installs the wheels without a network. Says how that was done."""
    files = [str(one) for one in sorted(wheels.glob("*.whl"))]
    with tempfile.TemporaryDirectory() as folder:
        if python312 is None:
            pip(
                "install",
                "--no-index",
                "--no-deps",
                *_for_the_machine(),
                "--target",
                folder,
                *files,
            )
            return (
                "the resolver took the wheels for Python 3.12 on Linux x86-64; no Python 3.12 is "
                "here to import them"
            )
        subprocess.run([python312, "-m", "venv", folder], check=True)
        python = str(Path(folder) / "bin" / "python")
        pip("install", "--no-index", "--no-deps", *files, python=python)
        names = sorted({name for file in files for name in _top_levels(Path(file))})
        done = subprocess.run([python, "-c", _IMPORTS, *names], capture_output=True, text=True)
        missing = {line.replace("_", "-") for line in done.stdout.split()}
        if done.returncode or (unknown := missing - {"yaml", *present}):
            raise SystemExit(
                "the wheels cannot be imported: "
                f"{done.stderr.strip()[-2000:] or ', '.join(sorted(unknown))}"
            )
        return (
            f"{len(files)} wheels were installed into a fresh Python 3.12 without a network, and "
            f"{len(names)} packages imported"
        )


_IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(error.name.partition(".")[0])
"""
"""Prints which modules were missed: some that the machine has are not here."""


def _top_levels(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = [
            one for one in archive.namelist() if ".dist-info/" not in one and ".data/" not in one
        ]
    packages = {
        name.partition("/")[0]
        for name in names
        if name.endswith("/__init__.py") and name.count("/") == 1
    }
    return packages | {
        name.removesuffix(".py") for name in names if "/" not in name and name.endswith(".py")
    }


def sizes(folder: Path) -> list[tuple[int, str]]:
    """Names and bytes of each file, and of metadata/ as a whole, largest first."""
    found: dict[str, int] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            name = path.relative_to(folder)
            key = "metadata/" if name.parts[0] == "metadata" else str(name)
            found[key] = found.get(key, 0) + path.stat().st_size
    return sorted(((size, name) for name, size in found.items()), reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, default=ROOT / "gpu-kit")
    parser.add_argument(
        "--python312",
        help="a Python 3.12 to install the wheels into; none: the resolver alone checks them",
    )
    args = parser.parse_args()
    args.to = args.to.resolve()
    shutil.rmtree(args.to, ignore_errors=True)
    present = there()
    ours = write_metadata(args.to / "metadata")
    download(ours, present, args.to / "wheels")
    write_sources(args.to / "sources.tar.gz")
    (args.to / "kit.sh").write_text(SCRIPT, encoding="utf-8")
    told = check_install(
        args.to / "wheels", present, shutil.which(args.python312) if args.python312 else None
    )
    listed = sizes(args.to)
    total = sum(size for size, _ in listed)
    for size, name in listed:
        print(f"{size / 1024:9,.0f} KiB  {name}")
    print(
        f"{total / 1024:9,.0f} KiB  {args.to.name}/, of {MOST_BYTES >> 20} MiB at most. "
        f"{told[0].upper()}{told[1:]}."
    )
    if total > MOST_BYTES:
        raise SystemExit(
            "the folder is larger than it may be: see LEFT_OUT in benchmarks/gpu_kit/collect.py"
        )


if __name__ == "__main__":
    main()
