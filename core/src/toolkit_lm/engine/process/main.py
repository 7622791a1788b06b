"""The engine process's main function; EngineProcess starts it.

Nothing heavy is imported before the lifeline is watched: from its first moments on, the process
ends with its front.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import importlib
import os
import select
import shutil
import signal
import sys
import threading

from toolkit_lm.engine.process.guard import guard

_LOOK = 1000
"""Milliseconds between two checks that the front lives. A fork of it may hold the lifeline open."""


def main() -> None:
    """Runs an engine until it fails; the end of the lifeline ends the process before that.
    Arguments: folder, lifeline, front's pid."""
    try:
        _run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def _run(folder: str, lifeline: int, parent: int) -> None:
    # The terminal's and the service manager's signals go to front and engine alike: the front
    # decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    unguard = guard(lifeline, folder)
    is_connected = threading.Event()
    threading.Thread(
        target=_watch,
        args=(folder, is_connected, lifeline, parent),
        name="toolkit_lm-lifeline",
        daemon=True,
    ).start()
    # Imports make many objects and hardly any garbage, and the objects stay.
    gc.disable()
    from toolkit_lm.engine.process.loop import serve

    # Torch takes most of a start. Import it while the front still reads its options.
    importlib.import_module("toolkit_lm.executor.in_process")
    gc.freeze()
    gc.enable()
    # The many sequences of a request are hardly garbage either: full collections come after ten
    # million new objects.
    gc.set_threshold(1_000, 10, 1_000)
    # Planning and computing hand over to each other in every step.
    sys.setswitchinterval(0.0005)

    def connected() -> None:
        # The socket lives on without its name, which may now belong to another process.
        shutil.rmtree(folder)
        is_connected.set()
        _die_with(lifeline)
        unguard()

    serve(folder, connected)


def _watch(folder: str, is_connected: threading.Event, lifeline: int, parent: int) -> None:
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    while not poll.poll(_LOOK) and os.getppid() == parent:
        pass
    while not is_connected.is_set() and os.path.exists(folder):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _die_with(lifeline: int) -> None:
    """Makes the kernel kill the process at the lifeline's end. The watching thread would wait for
    code that holds the interpreter lock."""
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
