"""An engine process that begins to import while its front still reads options: most of a start is
the import of torch."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from toolkit_lm.engine import EngineProcess
from toolkit_lm.errors import ToolkitError

_COMMANDS = ("serve",)
"""Commands that usually want an engine process, with few exceptions by their options."""
_SERVERS = ("serve", "render")
"""Commands for which a signal is the normal end."""
_process: ContextVar[EngineProcess | None] = ContextVar("_process", default=None)


@contextmanager
def engine_process(arguments: Sequence[str], environ: Mapping[str, str]) -> Iterator[None]:
    """Starts one for these arguments of `toolkit`, where they are of a command that wants it. At
    the end it ends."""
    if not _is_wanted(arguments, environ):
        yield
        return
    process = None
    try:
        process = EngineProcess()
    except ToolkitError:
        # It is said when an engine is made.
        yield
        return
    token = _process.set(process)
    try:
        yield
    finally:
        _process.reset(token)
        process.end()


def early_process() -> EngineProcess | None:
    """The process that was started for this command, for one engine; None where there is none. It
    must not be ended."""
    process = _process.get()
    _process.set(None)
    return process


def main() -> None:
    """The command `toolkit`."""
    # Imports make many objects and hardly any garbage.
    gc.set_threshold(50_000, 20, 100)
    arguments = sys.argv[1:]
    if arguments and arguments[0] in _SERVERS:
        # Until the server handles them itself: nothing is under way, and what was started ends with
        # this process.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(0))
    with engine_process(arguments, os.environ):
        from toolkit_lm_cli.app import run

        code = run(arguments)
    sys.exit(code)


def _is_wanted(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    if not arguments or arguments[0] not in _COMMANDS or "TOOLKIT_LM_ENGINE_PROCESS" in environ:
        return False
    if any(
        word.startswith(
            ("--help", "--engine-process", "--no-engine-process", "--data-parallel-size")
        )
        for word in arguments
    ):
        return False
    try:
        # A socket would get the number of a closed stream.
        for number in range(3):
            os.fstat(number)
    except OSError:
        return False
    return True
