"""How a process of the kit says what it finds: a line of JSON for each check, the moment that it is
known."""

from __future__ import annotations

import faulthandler
import json
import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGKILL, SIGUSR1
from typing import Any

LINES = "GPU_KIT_LINES"
LIFELINE = "GPU_KIT_LIFELINE"
"""Environment variables: the file descriptor for lines, and one that is closed when the kit has
ended."""
LONGEST = 3000
"""Characters of a text that are kept: a third of its first, and its last."""
WHERE = SIGUSR1
"""Signal at which a process writes where its threads are."""


class RefusedError(Exception):
    """Raised by a check that cannot run here, with the reason."""


class MissedError(Exception):
    """Raised by a check that ran and found a wrong result."""


def shortened(text: str, most: int = LONGEST) -> str:
    """Both ends of a text: an error's message begins a text, and the place ends it."""
    if len(text) <= most:
        return text
    return f"{text[: most // 3]}\n[...]\n{text[-2 * most // 3 :]}"


def emit(check: str, outcome: str, **found: Any) -> None:
    """Says what a check has found. `outcome`: "passed", "failed" or "skipped". Others' prints are
    not in the way."""
    line = json.dumps({"check": check, "outcome": outcome, **found}, default=str) + "\n"
    if LINES in os.environ:
        os.write(int(os.environ[LINES]), line.encode())
    else:
        print(line, end="", flush=True)


@contextmanager
def checking(check: str) -> Iterator[dict[str, Any]]:
    """Runs one check. What is put into the dict is said, and what is raised is said with its
    traceback: others go on."""
    found: dict[str, Any] = {}
    begun = time.monotonic()

    def seconds() -> float:
        return round(time.monotonic() - begun, 3)

    try:
        yield found
    except RefusedError as error:
        emit(check, "skipped", seconds=seconds(), why=str(error), **found)
    except Exception as error:
        why = str(error) if isinstance(error, MissedError) else f"{type(error).__name__}: {error}"
        shown = shortened(traceback.format_exc())
        emit(check, "failed", seconds=seconds(), why=shortened(why), traceback=shown, **found)
    else:
        emit(check, "passed", seconds=seconds(), **found)


def tell_where() -> None:
    """Has the process write its stacks when the kit asks where it is, before it is cut."""
    # Others put files of their own in the place of stderr meanwhile.
    faulthandler.register(WHERE, file=os.dup(2), all_threads=True)


def die_with_the_kit() -> None:
    """Ends this process and its children as soon as the kit has ended, however that did."""
    tell_where()
    if LIFELINE not in os.environ:
        return
    lifeline = int(os.environ[LIFELINE])

    def wait() -> None:
        while os.read(lifeline, 1):
            pass
        os.killpg(0, SIGKILL)

    threading.Thread(target=wait, daemon=True, name="lifeline").start()
