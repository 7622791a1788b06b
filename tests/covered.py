"""Which share of the lines was run, for each distribution.

usage: python tests/covered.py FILE

FILE is what `coverage json` wrote. Prints a table. Exit code 1: of all lines, fewer were run than
fail_under in pyproject.toml says.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def main(arguments: list[str]) -> int:
    """Prints the table, and what is wrong. Returns the exit code."""
    files = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))["files"]
    lines, run = lines_of_distributions(files)
    print(table(lines, run))
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lowest = config["tool"]["coverage"]["report"]["fail_under"]
    reached = 100 * run.total() / lines.total()
    if reached < lowest:
        print(f"error: {reached:.1f}% is below fail_under, {lowest}%", file=sys.stderr)
    return reached < lowest


def lines_of_distributions(files: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """The lines of each distribution that can be run, and those that were."""
    lines: Counter[str] = Counter()
    run: Counter[str] = Counter()
    for path, found in files.items():
        distribution = path.partition("/src/")[0]
        lines[distribution] += found["summary"]["num_statements"]
        run[distribution] += found["summary"]["covered_lines"]
    return lines, run


def table(lines: Counter[str], run: Counter[str]) -> str:
    """Table in Markdown: the least covered first, and a last row for all."""
    shares = sorted((run[name] / max(count, 1), name) for name, count in lines.items())
    rows = [f"| {share:.1%} | {lines[name]:,} | {name} |" for share, name in shares]
    total = f"| {run.total() / lines.total():.1%} | {lines.total():,} | in all |"
    return "\n".join(["| run | lines | distribution |", "| ---: | ---: | --- |", *rows, total])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
