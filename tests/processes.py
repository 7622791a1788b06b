"""Looks at processes that may end at any moment. A process that has gone fails nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil


def is_alive(process: psutil.Process | int) -> bool:
    """Whether a process, or the one of this pid, runs: neither gone nor a zombie."""
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    return False


def living(processes: Iterable[psutil.Process | int]) -> list[psutil.Process | int]:
    """Those that run."""
    return [process for process in processes if is_alive(process)]


def wait_until_gone(*processes: psutil.Process | int, seconds: float = 30) -> None:
    """Returns when none runs; fails after `seconds`."""
    end = time.monotonic() + seconds
    while alive := living(processes):
        assert time.monotonic() < end, f"alive still: {alive}"
        time.sleep(0.02)


def descendants(word: str) -> list[psutil.Process]:
    """Descendants of this process whose command has the word."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if word in " ".join(process.cmdline()):
                found.append(process)
    return found
