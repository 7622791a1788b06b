"""What makes starts short: nobody looks for garbage meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
            if not gc.get_freeze_count():
                # All of it is old now, and looked at when the host's old objects are: not at once.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
