"""Bounds the time of code that may never come back."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from toolkit_lm.errors import UnsupportedError


class _Overdue(BaseException):
    """Raised in the thread that takes too long. It does not derive from Exception, so that error
    handlers do not swallow it."""


@contextmanager
def deadline(seconds: float, action: str) -> Iterator[None]:
    """Stops the code that this thread runs in the context after `seconds` seconds. It then raises
    UnsupportedError: "transformers does not {what} within ...".

    Python code is stopped between two of its instructions, wherever it is; a call into compiled
    code has to return first."""
    thread = threading.get_ident()
    lock = threading.Lock()
    is_over = is_struck = has_arrived = is_done = False

    def strike() -> None:
        nonlocal is_struck
        with lock:
            if not is_over:
                is_struck = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(_Overdue)
                )

    timer = threading.Timer(seconds, strike)
    timer.daemon = True
    timer.start()
    refusal = f"transformers does not {action} within {seconds:g} s"
    try:
        try:
            yield
            is_done = True
        except _Overdue:
            has_arrived = True
            raise UnsupportedError(refusal) from None
        finally:
            with lock:
                is_over = True
            timer.cancel()
            # A raised exception arrives here at the latest, unless the code has swallowed it.
            # Withdrawing it would leave CPython 3.11 looking for it forever: the whole process then
            # runs more slowly, and under a profiler or a debugger no function returns.
            if is_struck and not has_arrived:
                for _ in range(100):
                    time.sleep(0)
    except _Overdue:
        if not is_done:
            raise UnsupportedError(refusal) from None
