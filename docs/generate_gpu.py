"""Writes the first part of docs/gpu.md from the results of benchmarks/gpu_kit.sh on a card: the last
one of each check.

usage: python docs/generate_gpu.py
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parent
PAGE = DOCS / "gpu.md"
BEGIN = "<!-- written by docs/generate_gpu.py -->\n"
END = "<!-- end of what is written by docs/generate_gpu.py -->\n"
sys.path.insert(0, str(DOCS.parent / "benchmarks"))

from gpu_kit.plan import Kit  # noqa: E402
from gpu_kit.results import FOLDER, all_of_cards, read  # noqa: E402
from gpu_kit.shape_8b import FULL  # noqa: E402
from gpu_kit.speed import PREFILL, START  # noqa: E402

Line = dict[str, Any]
NOTHING = """
**No GPU has run anything of this project**: no attention backend, no kernel, no CUDA graph, no NCCL. The automated tests have none. What
this page says of GPUs was read from the code, and not measured. `bash benchmarks/gpu_kit.sh` runs, checks and measures all of it in eight
minutes ([Benchmarks](benchmarks.md#gpus)); a dry run on a CPU is part of `make test-nightly`.

"""
NEVER = "Several GPUs and NCCL have run on no card: the kit has one."
BAD = ("failed", "cut", "unrun")


class Goal(NamedTuple):
    """A goal for a card."""

    text: str
    found: Callable[[Sequence[Line]], float | None]
    """The reached value; None: it was not measured."""
    shown: str
    """How that is written."""
    least: float | None = None
    most: float | None = None

    def row(self, lines: Sequence[Line]) -> str:
        found = self.found(lines)
        if found is None:
            return f"| {self.text} | not measured | |"
        met = found >= self.least if self.least is not None else found <= (self.most or 0.0)
        return f"| {self.text} | {self.shown.format(found)} | {'yes' if met else '**no**'} |"


def parity(lines: Sequence[Line]) -> float | None:
    """Checks of parts A to D that failed, or were not reached."""
    checks = [line for line in lines if line["part"] in "ABCD"]
    return float(sum(line["outcome"] in BAD for line in checks)) if checks else None


def best(
    part: str, check: str, key: str, choose: Callable[[Iterable[float]], float] = max
) -> Callable[[Sequence[Line]], float | None]:
    """Finder of a check's best number over all jobs of a part."""

    def find(lines: Sequence[Line]) -> float | None:
        found = [
            line[key]
            for line in lines
            if line["part"] == part and line["check"] == check and key in line
        ]
        return choose(found) if found else None

    return find


GOALS = (
    Goal("parity: checks of parts A to D that fail", parity, "{:.0f}", most=0.0),
    Goal(
        f"decode, {FULL.rows[-1]} rows, with graphs: at least 85 % of the copy bandwidth",
        best("E2", FULL.decode_name(FULL.rows[-1], FULL.short), "share"),
        "{:.0%}",
        least=0.85,
    ),
    Goal(
        "decode, 1 row, with graphs: at least 70 % of the copy bandwidth",
        best("E2", FULL.decode_name(1, FULL.short), "share"),
        "{:.0%}",
        least=0.7,
    ),
    Goal(
        "prefill: at least 60 % of the matrix rate",
        best("E1", PREFILL, "share"),
        "{:.0%}",
        least=0.6,
    ),
    Goal(
        "first token of a new process, warm: 2.5 s at most",
        best("E1", START, "seconds_since_process_start", min),
        "{:.1f} s",
        most=2.5,
    ),
)


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page as it should be."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + text(all_of_cards(FOLDER)) + END + after


def text(files: Sequence[Path]) -> str:
    """Page text for files of results, the oldest first."""
    if not files:
        return NOTHING + goals(()) + "\n"
    found: dict[tuple[str, str, str], Line] = {}
    for file in files:
        head, *lines = read(file)
        for line in lines:
            if "outcome" in line:
                found[line["part"], line["job"], line["check"]] = line
    checks = list(found.values())
    about = {
        key: value
        for line in checks
        if line["job"] == "machine"
        for key, value in line.items()
        if isinstance(value, str)
    }
    parts = [
        f"\n{first_line(head, len(files), about, checks)}\n\n{NEVER}\n",
        outcomes(checks),
        goals(checks),
        speeds(checks),
        faults(checks),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def first_line(head: Line, num_runs: int, about: dict[str, str], checks: Sequence[Line]) -> str:
    """`head` is that of the last run."""
    counts = Counter(line["outcome"] for line in checks)
    told = ", ".join(f"{counts[one]:,} {name}" for one, name in _NAMES.items() if counts[one])
    versions = ", ".join(
        f"{name} {about.get(name, 'unknown')}"
        for name in ("torch", "triton", "transformers", "python")
    )
    card = f"{about.get('card', 'an unknown card')} (driver {about.get('driver', 'unknown')})"
    each = f", each as the last of {num_runs} runs had it" if num_runs > 1 else ""
    return (
        f"**The kit ran on {card} on {head['date']}**, with {versions}, at "
        f"{head['commit'][:12]}. Of its checks{each}: {told}."
    )


_NAMES = {
    "passed": "passed",
    "failed": "failed",
    "skipped": "could not run there",
    "cut": "were cut off",
    "unrun": "were not reached",
}


def outcomes(checks: Sequence[Line]) -> str:
    """A row for each part."""
    rows = [f"| part | {' | '.join(_NAMES.values())} |", f"|{' --- |' * (1 + len(_NAMES))}"]
    for part in Kit(quick=False).parts():
        counts = Counter(line["outcome"] for line in checks if line["part"] == part.name)
        cells = " | ".join(f"{counts[one]:,}" for one in _NAMES)
        rows.append(f"| {part.name}: {part.title} | {cells} |")
    return "\n".join(rows) + "\n"


def goals(checks: Sequence[Line]) -> str:
    return (
        "\n".join(
            [
                "| goal, of an 8B shape | found | reached |",
                "| --- | --- | --- |",
                *(goal.row(checks) for goal in GOALS),
            ]
        )
        + "\n"
    )


def speeds(checks: Sequence[Line]) -> str:
    """A row for each number of the parts E1 and E2."""
    rows = []
    for line in checks:
        if line["part"] in ("E1", "E2") and "tokens_per_second" in line:
            step = f"{line['step_ms']:.2f} ms" if "step_ms" in line else ""
            share = f"{line['share']:.0%}" if "share" in line else ""
            rows.append(
                f"| {line['job']} | {line['check']} | {step} | {line['tokens_per_second']:,.0f} "
                f"| {share} |"
            )
    if not rows:
        return ""
    return (
        "\n".join(
            [
                "| attention | what | step | tokens/s | share of the card |",
                "| --- | --- | --- | --- | --- |",
                *rows,
            ]
        )
        + "\n"
    )


def faults(checks: Sequence[Line]) -> str:
    """Failed checks, and checks that could not run, each reason once."""
    told = Counter(
        (line["outcome"], line["part"], line["job"], line.get("why", ""))
        for line in checks
        if line["outcome"] != "passed"
    )
    rows = [
        f"- {part} {job}, {count} {_NAMES[outcome]}: {why}"
        for (outcome, part, job, why), count in told.items()
    ]
    return "\n".join(rows) + "\n" if rows else ""


if __name__ == "__main__":
    main()
