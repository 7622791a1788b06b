"""Bounds the time of code that may never come back."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from toolkit_lm.errors import UnsupportedError


class _Overdue(BaseException):
    """Raised in the thread that takes too long. It is no Exception, so that what handles errors does not go on."""


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Ends what this thread runs inside after so many seconds. Raises UnsupportedError then: "transformers does not {what} within ...".

    Python code is ended between two of its instructions, wherever it is; a call into compiled code has to return first.
    """
    thread, lock = threading.get_ident(), threading.Lock()
    is_over = is_struck = False

    def strike() -> None:
        nonlocal is_struck
        with lock:
            if not is_over:
                is_struck = True
                _raise_in(thread, _Overdue)

    timer = threading.Timer(seconds, strike)
    timer.daemon = True
    timer.start()
    try:
        yield
    except _Overdue:
        raise UnsupportedError(f"transformers does not {what} within {seconds:g} s") from None
    finally:
        with lock:
            is_over = True
        timer.cancel()
        if is_struck:
            # Where the time was up just as the work was done, nothing is to be raised any more.
            _raise_in(thread, None)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    argument = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), argument)
