"""Work of the server in threads: daemons, so that work that hangs cannot keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from toolkit_lm.frontend import AsyncLLM

CLOSING = 5
"""Seconds that the last answers, and then the engine, get at the end."""

Result = TypeVar("Result")


def in_thread(work: Callable[[], Result]) -> Future[Result]:
    """What `work` returns or raises, once it has."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, name="toolkit_lm-server", daemon=True).start()
    return future


def close(making: Future[AsyncLLM]) -> Future[None]:
    """Closes an engine, which may have to be made first."""

    def end() -> None:
        if making.exception() is None:
            making.result().close()

    return in_thread(end)
