"""Runs the parts one after another, each until its time is over, and says what each found."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_kit import jobs
from gpu_kit.jobs import Job
from gpu_kit.results import Results

LEAST = 2.0
"""With fewer seconds left, no process is begun."""
PASSED = 0
FAILED = 1
USAGE = 2
NO_CARD = 3
"""Exit codes."""
_TOLD = ("check", "outcome", "seconds", "why", "traceback", "part", "job", "at")
_BAD = ("failed", "cut", "unrun")


@dataclass(frozen=True)
class Stage:
    """Processes that belong together."""

    name: str
    title: str
    ends: float
    """When it must be over at the latest, as a share of all seconds. What a part leaves is the next
    one's."""
    jobs: Callable[[], Sequence[Job]]


class Driver:
    """Runs parts, writes each line to the results, and counts the outcomes."""

    def __init__(self, results: Results, seconds: float, begun: float) -> None:
        """`begun`: time.monotonic() of the kit's start."""
        self.counts: Counter[str] = Counter()
        self._results = results
        self._seconds = seconds
        self._begun = begun

    @property
    def exit_code(self) -> int:
        return FAILED if any(self.counts[one] for one in _BAD) else PASSED

    def run(self, part: Stage) -> None:
        """Runs the jobs of a part. Each may take an equal share of the time that the part has
        left."""
        end = self._begun + self._seconds * part.ends
        waiting = list(part.jobs())
        for number, job in enumerate(waiting):
            num_left = sum(one.refusal is None for one in waiting[number:])
            limit = (end - time.monotonic()) / max(1, num_left)
            before = self.counts.copy()
            if job.refusal is not None:
                self.add(part, job, {"check": "process", "outcome": "skipped", "why": job.refusal})
                continue
            if limit < LEAST:
                self.add(
                    part, job, {"check": "process", "outcome": "unrun", "why": "no time was left"}
                )
                continue
            for line in jobs.run(job, limit):
                self.add(part, job, line)
            told = ", ".join(
                f"{count} {outcome}" for outcome, count in sorted((self.counts - before).items())
            )
            print(f"{part.name} {job.name}: {told}", flush=True)

    def add(self, part: Stage, job: Job, line: dict[str, Any]) -> None:
        """Writes a line, and prints it; of tests, which are many, those alone that are bad."""
        line = {
            "part": part.name,
            "job": job.name,
            "at": round(time.monotonic() - self._begun, 1),
            **line,
        }
        self._results.add(line)
        self.counts[line["outcome"]] += 1
        if job.ends or line["outcome"] in _BAD:
            print(shown(line), flush=True)


def shown(line: dict[str, Any]) -> str:
    """A line for people."""
    found = ", ".join(
        f"{name} {json.dumps(value)}" for name, value in line.items() if name not in _TOLD
    )
    why = "; ".join(one for one in (line.get("why"), found) if one)
    where = f"{line['part']} {line['job']} | {line['check']}"
    told = (
        f"{where}: {line['outcome']}"
        + (f": {why}" if why else "")
        + f" ({line.get('seconds', 0):.1f} s)"
    )
    if line["outcome"] in _BAD and line.get("traceback"):
        told += "\n" + "\n".join(f"    {one}" for one in line["traceback"].splitlines()[-12:])
    return told
