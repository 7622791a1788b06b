"""How a process of the kit says what it finds: a line of JSON for each check, the moment that it is
known."""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGKILL
from typing import Any

LINES = "GPU_KIT_LINES"
LIFELINE = "GPU_KIT_LIFELINE"
"""Environment variables: the file descriptor for lines, and one that is closed when the kit has
ended."""
LONGEST = 3000
"""Characters of a traceback that are kept, its last."""


class RefusedError(Exception):
    """Raised by a check that cannot run here, with the reason."""


class MissedError(Exception):
    """Raised by a check that ran and found a wrong result."""


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
        shown = traceback.format_exc()[-LONGEST:]
        emit(check, "failed", seconds=seconds(), why=why[:LONGEST], traceback=shown, **found)
    else:
        emit(check, "passed", seconds=seconds(), **found)


def die_with_the_kit() -> None:
    """Ends this process and its children as soon as the kit has ended, however that did."""
    if LIFELINE not in os.environ:
        return
    lifeline = int(os.environ[LIFELINE])

    def wait() -> None:
        while os.read(lifeline, 1):
            pass
        os.killpg(0, SIGKILL)

    threading.Thread(target=wait, daemon=True, name="lifeline").start()
