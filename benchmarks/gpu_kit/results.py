"""The file of results: lines of JSON, one for each check, so that it is whole at every moment.

The first line says what the kit runs on, the last one how it ended. A kit that was killed has no
last line, and all the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "results"


class Results:
    """A file that is appended to, a line at a time. `folder` is made where it is not there."""

    def __init__(self, folder: Path, kind: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        self.path = folder / f"{kind}-{stamp}.json"
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, line: dict[str, Any]) -> None:
        """One call of the system for each line: whoever kills this process finds whole lines."""
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file. A last one that was not written to its end is left out."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def all_of_cards(folder: Path = FOLDER) -> list[Path]:
    """Files of runs on cards, the oldest first."""
    return sorted(folder.glob("gpu-*.json"))
