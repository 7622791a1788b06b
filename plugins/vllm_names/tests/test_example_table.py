"""The table of vLLM's examples in docs/vllm.md: each file has a program, or a reason; and programs
import what the files do.

vllm_examples.json has, for the examples of one version of vLLM that make an engine, the names that
they import of it: MODULE:NAME, or a module.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KNOWN = json.loads((HERE / "vllm_examples.json").read_text(encoding="utf-8"))
PAGE = (HERE.parents[2] / "docs/vllm.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Examples\n")[2].partition("\n## ")[0]
ROW = re.compile(r"^\| `([^`]+)` \| (?:`(\w+)`)? ?\| (.*?) ?\|$", re.MULTILINE)
ROWS = {f"{path}.py": (program, reason) for path, program, reason in ROW.findall(SECTION)}
RUN = {path: program for path, (program, reason) in ROWS.items() if not reason}
DOWNLOADS = [path for path, (_, reason) in ROWS.items() if reason.startswith("downloads ")]


def imports(text: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return found


def test_each_file_has_a_program_or_a_reason():
    assert {*ROWS} == {*KNOWN["imports"]}
    for path, (program, reason) in ROWS.items():
        assert program or reason, path
        assert not program or (HERE / f"examples/{program}.py").is_file(), path


def test_the_page_counts_its_rows():
    others = len(ROWS) - len(DOWNLOADS)
    assert f"vLLM {KNOWN['version']} has {len(ROWS)} examples" in SECTION
    assert f"{len(DOWNLOADS)} of them download" in SECTION
    assert f"Of the other {others}, {len(RUN)} run" in SECTION
    assert len(RUN) >= 30 and len({*RUN.values()}) == len(RUN)


@pytest.mark.parametrize("path", RUN)
def test_a_program_imports_what_its_file_does(path):
    for entry in KNOWN["imports"][path]:
        module, _, name = entry.partition(":")
        found = importlib.import_module(module.replace("vllm", "toolkit_lm_vllm", 1))
        assert not name or getattr(found, name) is not None
    program = (HERE / f"examples/{RUN[path]}.py").read_text(encoding="utf-8")
    assert {*KNOWN["imports"][path]} - imports(program) == set()
