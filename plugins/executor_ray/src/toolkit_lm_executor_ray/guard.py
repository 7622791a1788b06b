"""A process that outlives an engine, and ends what is left of its Ray cluster: Ray's agents would
run on by themselves."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

VARIABLE = "EXECUTOR_RAY_CLUSTER"
"""Which cluster a process is of."""
_RAYLET = "RAY_RAYLET_PID"
"""Environment variable that Ray's raylet sets for processes that it starts."""
_GRACE = 1.0
"""Seconds that its processes get to end by themselves."""
_MOST = 4.0
"""Seconds after which a process that ignores signals is given up."""
_LOOK = 0.1


def main() -> None:
    """Waits for the end of stdin, whose other end dies with the engine. Arguments: the cluster's
    mark, and its folder.

    stdin holds the numbers of processes, a line each: of those that are known to be the cluster's.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    known = []
    for line in sys.stdin:
        with suppress(psutil.Error, ValueError):
            known.append(psutil.Process(int(line)))
    end(sys.argv[1], known)
    shutil.rmtree(sys.argv[2], ignore_errors=True)


def is_rays(process: psutil.Process) -> bool:
    """Whether Ray runs it: its program is of Ray's package, Ray has given it its name, or a raylet
    has started it."""
    try:
        words = process.cmdline()[:3]
        if any(word.startswith(_package()) for word in words) or (
            words and words[0].startswith("ray::")
        ):
            return True
        # This process may be of another cluster's.
        return process.environ().get(_RAYLET) not in (None, os.environ.get(_RAYLET))
    except (psutil.Error, OSError):
        return False


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """All descendants of a process; an empty list if it has ended."""
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _package() -> str:
    """Ray's folder, with a slash. Nothing of it is imported."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.origin is not None, "the plugin needs it"
    return os.path.join(os.path.dirname(spec.origin), "")


def end(mark: str, known: Iterable[psutil.Process]) -> None:
    """Ends those that are known, and all of the cluster that have its mark: it is lost where a
    process calls itself a name.

    What the engine's host has started while the cluster started has the mark too, and is none of
    Ray's.
    """
    start = time.monotonic()
    left = set(known)
    while (
        left := {process for process in left | _marked(mark) if _lives(process)}
    ) and time.monotonic() < start + _MOST:
        if time.monotonic() >= start + _GRACE:
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
        time.sleep(_LOOK)


def _marked(mark: str) -> set[psutil.Process]:
    """Ray's that have the mark, and their descendants."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        # Others' environments cannot be read.
        with suppress(psutil.Error, OSError):
            if process.environ().get(VARIABLE) == mark and is_rays(process):
                found |= {process, *descendants(process)}
    return found


def _lives(process: psutil.Process) -> bool:
    """Whether the process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
