"""What makes starts short: nobody looks for garbage meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FROZEN_BY_PYTHON = 1_000
"""More objects than Python 3.12 freezes at its start. A host that freezes has several times
that."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For imports, and the making of models: many objects and hardly any garbage. Also a
    decorator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_freeze_count() < _FROZEN_BY_PYTHON:
                # All of it is old now, and looked at when the host's old objects are: not at once.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
