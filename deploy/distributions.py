"""Builds the wheels, or the source distributions, of this repository, all in one process.

usage: python deploy/distributions.py --to FOLDER [--sdist] [--of NAME ...]

Without --of it builds all; with it the named ones, and what they need of this repository.
It needs hatchling, and no network. The C sources are compiled where there is a compiler.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from hatchling.build import build_sdist, build_wheel

ROOT = Path(__file__).resolve().parents[1]
PLACES = (".", "core", "libs/*", "plugins/*", "contrib_models/*", "contrib_backends/*")


def projects() -> dict[str, Path]:
    """Name of a distribution -> its folder."""
    found = (path for place in PLACES for path in sorted(ROOT.glob(f"{place}/pyproject.toml")))
    return {_project(path.parent)["name"]: path.parent for path in found}


def needed(names: Iterable[str], folders: Mapping[str, Path]) -> list[str]:
    """The named distributions and all that they need of `folders`, extras aside."""
    found: list[str] = []
    left = list(names)
    while left:
        name = left.pop()
        if name in found or name not in folders:
            continue
        found.append(name)
        left += (re.split(r"[^\w-]", need)[0] for need in _project(folders[name])["dependencies"])
    return sorted(found)


def build(folder: Path, target: Path, *, sdist: bool = False) -> Path:
    """Builds the distribution of a folder. Returns the file."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        # Hatchling says what it makes of files, line by line.
        with redirect_stdout(sys.stderr):
            return target / (build_sdist if sdist else build_wheel)(str(target))
    finally:
        os.chdir(before)


def _project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", type=Path, required=True, help="folder of the files")
    parser.add_argument("--sdist", action="store_true", help="source distributions, not wheels")
    parser.add_argument("--of", nargs="+", metavar="NAME", help="distributions. Default: all")
    arguments = parser.parse_args()
    folders = projects()
    if unknown := sorted(set(arguments.of or ()) - set(folders)):
        parser.error(f"no distribution {unknown[0]!r}. There are: {', '.join(sorted(folders))}")
    target = arguments.to.resolve()
    target.mkdir(parents=True, exist_ok=True)
    kind = "*.tar.gz" if arguments.sdist else "*.whl"
    for stale in target.glob(f"toolkit_lm{kind}"):
        stale.unlink()
    start = time.monotonic()
    names = needed(arguments.of, folders) if arguments.of else sorted(folders)
    for name in names:
        build(folders[name], target, sdist=arguments.sdist)
    what = "source distributions" if arguments.sdist else "wheels"
    print(f"{len(names)} {what} in {time.monotonic() - start:.1f} s: {arguments.to}")


if __name__ == "__main__":
    main()
