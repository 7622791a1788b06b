"""`covered.py`: what it counts, and when it fails."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("covered", Path(__file__).with_name("covered.py"))
covered = importlib.util.module_from_spec(spec)
spec.loader.exec_module(covered)


@pytest.mark.parametrize(("lowest", "code"), [(39.9, 0), (40.0, 0), (40.1, 1)])
def test_lines_are_counted_for_each_distribution(tmp_path, monkeypatch, capsys, lowest, code):
    counts = {
        "core/src/toolkit_lm/a.py": (60, 20),
        "core/src/toolkit_lm/room/b.py": (20, 10),
        "plugins/server/src/toolkit_lm_server/c.py": (20, 10),
        "plugins/cli/src/toolkit_lm_cli/empty.py": (0, 0),
    }
    files = {
        path: {"summary": {"num_statements": lines, "covered_lines": run}}
        for path, (lines, run) in counts.items()
    }
    (tmp_path / "coverage.json").write_text(json.dumps({"files": files}))
    pyproject = f"[tool.coverage.report]\nfail_under = {lowest}\n"
    (tmp_path / "pyproject.toml").write_text(pyproject)
    monkeypatch.setattr(covered, "ROOT", tmp_path)
    assert covered.main([str(tmp_path / "coverage.json")]) == code
    told = capsys.readouterr()
    assert told.out.splitlines()[2:] == [
        "| 0.0% | 0 | plugins/cli |",
        "| 37.5% | 80 | core |",
        "| 50.0% | 20 | plugins/server |",
        "| 40.0% | 100 | in all |",
    ]
    assert ("40.0% is below fail_under, 40.1%" in told.err) == bool(code)
