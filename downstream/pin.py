"""Pins the plugins of this folder to a version of the contract.

usage: python downstream/pin.py

They stand for those of third parties: what must change in them, every author must change.
CONTRACT holds the version that they are written for, and a hash of each of their files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from toolkit_lm.plugin import API_VERSION

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "contract_changes.md"
PATTERNS = ("*/pyproject.toml", "*/src/**/*", "*/tests/**/*")
ADVICE = (
    "What these plugins must change, every author of a plugin must. "
    "Where one cannot stay as it is, raise API_VERSION, "
    "unless it was raised since the last release; "
    "say in its section of docs/contract_changes.md what an author changes; "
    "then run python downstream/pin.py."
)


def main() -> int:
    """Writes CONTRACT anew where that is allowed. Returns the exit code."""
    if problem := refusal(HERE, PAGE, API_VERSION):
        print(f"error: {problem}", file=sys.stderr)
        return 1
    (HERE / "CONTRACT").write_text(pin(HERE, PAGE, API_VERSION))
    return 0


def refusal(folder: Path, page: Path, version: str) -> str | None:
    """Why the plugins in `folder` may not be pinned anew; None where they may.

    Their files differ, yet neither the version does, nor what `page` says of it.
    """
    if not section(page, version):
        return f"{page.name} has no section {version}. {ADVICE}"
    old = _read(folder)
    new = _lines(folder, page, version)
    same = all(old.get(key) == new[key] for key in ("API_VERSION", page.name))
    return problem(folder, version) if same else None


def problem(folder: Path, version: str) -> str | None:
    """The problem with the pin of the plugins in `folder`. None where there is none."""
    old = _read(folder)
    if old.get("API_VERSION") != version:
        pinned = old.get("API_VERSION")
        return f"API_VERSION is {version}, and downstream is pinned to {pinned}. {ADVICE}"
    new = dict(_hashes(folder))
    pinned_files = {key: value for key, value in old.items() if "/" in key}
    changed = sorted(
        name for name in new.keys() | pinned_files if new.get(name) != pinned_files.get(name)
    )
    if changed:
        return f"{', '.join(changed)}: changed, and API_VERSION is still {version}. {ADVICE}"
    return None


def pin(folder: Path, page: Path, version: str) -> str:
    """The text of CONTRACT as things are now."""
    return "".join(f"{value} {key}\n" for key, value in _lines(folder, page, version).items())


def sections(page: Path) -> list[tuple[str, str]]:
    """Each version that `page` has a section of, as it stands there, and that section's text."""
    parts = re.split(r"^## (\d+\.\d+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [(version, text.strip()) for version, text in zip(parts[1::2], parts[2::2], strict=True)]


def section(page: Path, version: str) -> str:
    """The section of `page` on a version. "" where it has none."""
    return dict(sections(page)).get(version, "")


def _lines(folder: Path, page: Path, version: str) -> dict[str, str]:
    changes = sha256(section(page, version).encode()).hexdigest()
    return {"API_VERSION": version, page.name: changes, **dict(_hashes(folder))}


def _read(folder: Path) -> dict[str, str]:
    lines = (folder / "CONTRACT").read_text(encoding="utf-8").splitlines()
    return {key: value for value, _, key in (line.partition(" ") for line in lines)}


def _hashes(folder: Path) -> Iterator[tuple[str, str]]:
    paths = {path for pattern in PATTERNS for path in folder.glob(pattern)}
    for path in sorted(paths):
        if path.is_file() and "__pycache__" not in path.parts:
            name = path.relative_to(folder).as_posix()
            yield name, sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
