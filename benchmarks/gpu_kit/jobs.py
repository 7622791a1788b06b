"""A process of the kit, and what it says until it ends or its time is over."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gpu_kit.report import LIFELINE, LINES, LONGEST, WHERE

ROOT = Path(__file__).parents[2]
COMMIT = "COMMIT"
"""A file beside the sources of a kit: where git would say what they are."""
STACKS = 12000
"""Characters of a process's stacks that are kept, their last: its main thread comes last."""
_FRAME = re.compile(r'^  File "(?:.*/)?([^"/]+)", line (\d+) in (.+)$')


@dataclass(frozen=True)
class Job:
    """Command of one process."""

    name: str
    command: tuple[str, ...]
    """Arguments of this Python."""
    environ: Mapping[str, str] = field(default_factory=dict)
    refusal: str | None = None
    """Why it is not begun; None: it is."""
    ends: bool = True
    """Whether an exit code other than 0 is a fault. pytest's says only that a test has failed,
    which the test's line says."""


def module(
    name: str, what: str, *arguments: str, refusal: str | None = None, **environ: str
) -> Job:
    """A job that runs a module of the kit."""
    return Job(name, ("-m", f"gpu_kit.{what}", *arguments), environ, refusal)


def run(job: Job, limit: float) -> Iterator[dict[str, Any]]:
    """Yields what a job says, each line at once. After `limit` seconds it is ended, with all that
    it has started."""
    with tempfile.TemporaryFile() as log:
        lines, said = os.pipe()
        lifeline, alive = os.pipe()
        environ = {**os.environ, **job.environ, LINES: str(said), LIFELINE: str(lifeline)}
        process = subprocess.Popen(
            [sys.executable, *job.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(said, lifeline),
            start_new_session=True,
            cwd=ROOT,
            env=environ,
        )
        os.close(said)
        os.close(lifeline)
        try:
            yield from _followed(job, process, lines, time.monotonic() + limit, log)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(lines)
            os.close(alive)


def _followed(
    job: Job, process: subprocess.Popen[bytes], lines: int, end: float, log: IO[bytes]
) -> Iterator[dict[str, Any]]:
    """Lines that the process writes, and at its end any fault of the process itself."""
    begun = time.monotonic()
    num_lines = 0
    has_failed = False
    for line in _lines(lines, end):
        num_lines += 1
        has_failed |= line["outcome"] == "failed"
        yield line
    took = {"seconds": round(time.monotonic() - begun, 3)}
    try:
        code = process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        told = _tail(log)
        stacks = _stacks(process, log)
        yield {
            "check": "process",
            "outcome": "cut",
            "why": "its time was over" + _place(stacks),
            "traceback": f"{told}\n{stacks}".strip(),
            **took,
        }
        return
    if code and (job.ends or not has_failed):
        why = f"the process ended with {code}"
    elif not num_lines:
        why = "the process has found nothing"
    else:
        return
    yield {"check": "process", "outcome": "failed", "why": why, "traceback": _tail(log), **took}


def _lines(pipe: int, end: float) -> Iterator[dict[str, Any]]:
    """Until the pipe is closed at its other side, or the time is over."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (left := end - time.monotonic()) > 0 and selector.select(left):
            if not (found := os.read(pipe, 65536)):
                return
            *whole, rest = (rest + found).split(b"\n")
            for line in whole:
                yield json.loads(line)


def _tail(log: IO[bytes]) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - LONGEST))
    return log.read().decode(errors="replace")


def _stacks(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    """The stacks of the threads of a process and of its children, as they write them to the log."""
    before = size = log.seek(0, os.SEEK_END)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, WHERE)
    for _ in range(20):
        time.sleep(0.1)
        if before < size == log.seek(0, os.SEEK_END):
            break
        size = log.seek(0, os.SEEK_END)
    log.seek(max(before, size - STACKS))
    return log.read().decode(errors="replace")


def _place(stacks: str) -> str:
    """The innermost frames of the last thread."""
    lines = stacks.strip().splitlines()
    begin = max(
        (at for at, line in enumerate(lines) if "most recent call first" in line), default=0
    )
    frames = [found for line in lines[begin:] if (found := _FRAME.match(line))]
    shown = " < ".join(
        f"{file}:{line} {name}" for file, line, name in (f.groups() for f in frames[:5])
    )
    return f", at {shown}" if shown else ""
