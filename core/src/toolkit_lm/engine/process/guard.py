"""A guard process that ends an engine process together with its front. Threads of the engine
cannot: an import may hold the interpreter for seconds."""

from __future__ import annotations

import os
import select
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress


def guard(lifeline: int, folder: str) -> Callable[[], None]:
    """Starts a small process that waits for the end of the lifeline, then kills this process and
    removes the folder.

    It is a fork, so there must be no other thread yet. Returns a function that ends it, for when
    the folder's removal is another process's duty. It also ends with this process.
    """
    guarded = os.getpid()
    watched, held = os.pipe()
    child = os.fork()
    if child:
        os.close(watched)

        def end() -> None:
            os.close(held)
            # If the parent ignores SIGCHLD, which outlives exec, the kernel keeps no exit status of
            # a child.
            with suppress(ChildProcessError):
                os.waitpid(child, 0)

        return end
    try:
        os.close(held)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        poll = select.poll()
        poll.register(lifeline, 0)
        poll.register(watched, 0)
        # The end of either, and nothing that is written.
        ready = [descriptor for descriptor, _ in poll.poll()]
        if watched not in ready:
            os.kill(guarded, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)
