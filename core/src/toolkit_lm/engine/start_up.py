"""Shorter starts, without garbage collection meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FROZEN_BY_PYTHON = 1_000
"""More objects than Python 3.12 freezes at its start. A host that freezes has several times that
number."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Context without garbage collection, for imports and for making models: many objects and
    hardly any garbage. Also a decorator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_freeze_count() < _FROZEN_BY_PYTHON:
                # All of these objects are old now. They are collected with the host's old objects:
                # not at once.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
