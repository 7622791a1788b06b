"""A worker's main function; WorkerProcess starts it.

Nothing heavy is imported before the lifeline is watched: from its first moments on, the process
ends with its engine.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import os
import select
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial

from toolkit_lm.engine import guard

_LOOK = 1000
"""Milliseconds between two checks that the engine lives, in case a fork of it holds the lifeline
open."""
_MOST_LOOKS = 100
"""Most tries to remove the folders that the engine has left."""


def main() -> None:
    """Runs a worker until it fails; the end of the lifeline ends the process before that.

    Arguments: rank, folder, lifeline, the pid of who has started it, the address of the engine's
    machine where ranks are on several.
    """
    try:
        _run(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def _run(rank: int, folder: str, lifeline: int, parent: int, master: str) -> None:
    # The terminal's and the service manager's signals go to all processes alike: the front decides.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # 32 bytes, which the engine writes in one piece.
    key = os.read(lifeline, 64)
    unguard = guard(lifeline, folder)
    threading.Thread(
        target=_watch, args=(folder, lifeline, parent), name="toolkit_lm-lifeline", daemon=True
    ).start()
    # Imports make many objects and hardly any garbage, and what they make stays.
    gc.disable()
    from toolkit_lm_executor_mp.serve import serve

    gc.freeze()
    gc.enable()
    unguard()

    serve(rank, folder, key, master, partial(_die_with, lifeline))


def _watch(folder: str, lifeline: int, parent: int) -> None:
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    while not poll.poll(_LOOK) and os.getppid() == parent:
        pass
    with suppress(OSError):
        _remove(folder)
    os._exit(0)


def _remove(folder: str) -> None:
    """Removes the folders where the ranks have met and reconnected."""
    parent_folder, name = os.path.split(folder)
    # Until the others have ended as well, they may write there.
    for _ in range(_MOST_LOOKS):
        left = [
            entry
            for entry in os.listdir(parent_folder)
            if entry == name or entry.startswith(f"{name}-")
        ]
        if not left:
            return
        for entry in left:
            shutil.rmtree(os.path.join(parent_folder, entry), ignore_errors=True)
        time.sleep(0.01)


def _die_with(lifeline: int, dies: bool) -> None:
    """Has the kernel kill the process when the lifeline ends. The watching thread is too late if
    other code holds the interpreter lock.

    `dies`: False undoes it, so that the thread can remove the folders that the engine has left.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC if dies else flags & ~os.O_ASYNC)
