"""Workers that are harmed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest


@pytest.fixture
def sabotage(monkeypatch, tmp_path):
    """A function (rank, when, how), after which that worker is harmed. It gives the file that is
    there once it was."""
    shutil.copy(Path(__file__).with_name("saboteur.py"), tmp_path / "toolkit_lm_saboteur.py")
    info = tmp_path / "toolkit_lm_saboteur-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: toolkit-lm-saboteur\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text("[toolkit_lm]\nsaboteur = toolkit_lm_saboteur\n")
    monkeypatch.syspath_prepend(tmp_path)
    if plugins := os.environ.get("TOOLKIT_LM_PLUGINS"):
        monkeypatch.setenv("TOOLKIT_LM_PLUGINS", f"{plugins},saboteur")
    mark = tmp_path / "struck"

    def order(rank: int, when: str, how: str) -> Path:
        monkeypatch.setenv(
            "SABOTAGE", json.dumps({"rank": rank, "when": when, "how": how, "mark": str(mark)})
        )
        return mark

    yield order
    sys.modules.pop("toolkit_lm_saboteur", None)
