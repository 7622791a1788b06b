"""Where the tests' time goes: durations.py FILE. FILE is what a run wrote under TOOLKIT_DURATIONS.
Prints Markdown tables of seconds."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

MOST = 60
"""Files, and tests, that are listed."""


def tables(lines: list[str]) -> str:
    """The longest files and the longest tests. `lines`: "seconds, part, outcome, name" with tabs
    between, as conftest.py writes them."""
    files: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for line in lines:
        seconds, part, _, name = line.split("\t", 3)
        file = name.partition("::")[0]
        files[file] += float(seconds)
        tests[name] += float(seconds)
        counts[file] += part == "setup"
    told = [
        f"{counts.total()} tests, {sum(files.values()):.0f} seconds in all",
        "",
        "| seconds | tests | file |",
        "| --- | --- | --- |",
    ]
    told += [
        f"| {seconds:.0f} | {counts[file]} | {file} |" for file, seconds in files.most_common(MOST)
    ]
    told += ["", "| seconds | test |", "| --- | --- |"]
    told += [f"| {seconds:.1f} | {name} |" for name, seconds in tests.most_common(MOST)]
    return "\n".join(told)


if __name__ == "__main__":
    print(tables(Path(sys.argv[1]).read_text().splitlines()))
