"""A process that outlives an engine, and ends what is left of its Ray cluster: Ray's agents would run on by themselves."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

VARIABLE = "EXECUTOR_RAY_CLUSTER"
"""Which cluster a process is of."""
_GRACE = 1.0
"""Seconds that its processes get to end by themselves."""
_MOST = 4.0
"""Seconds after which nobody waits for one that a signal does not end."""
_LOOK = 0.1


def main() -> None:
    """Waits for the end of stdin, whose other end dies with the engine. Arguments: the cluster's mark, and its folder.

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


def end(mark: str, known: Sequence[psutil.Process]) -> None:
    """Ends those that are known, and all of this user whose environment has the mark: it is lost where a process calls itself a name."""
    start = time.monotonic()
    while (left := [*_marked(mark), *filter(_lives, known)]) and time.monotonic() < start + _MOST:
        if time.monotonic() >= start + _GRACE:
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
        time.sleep(_LOOK)


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        # Others' environments cannot be read.
        with suppress(psutil.Error, OSError):
            if process.environ().get(VARIABLE) == mark and _lives(process):
                found.append(process)
    return found


def _lives(process: psutil.Process) -> bool:
    """It is still the same, and nobody waits for a word of its parent."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
