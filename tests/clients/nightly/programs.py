"""Programs of Node, in the folder `node`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from weather import QUESTION

MODULES = os.environ.get("TOOLKIT_NODE", ".")
"""Folder with the packages that node/package.json names, which `make test-clients-nightly` sets."""


def run(name: str, url: str, key: str) -> dict[str, Any]:
    """Runs a program and returns the JSON that it prints. It is copied, as Node looks for packages
    beside it."""
    there = shutil.copy(Path(__file__).parent / "node" / name, MODULES)
    done = subprocess.run(
        ["node", there, url, key, "tiny-tools", QUESTION],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
