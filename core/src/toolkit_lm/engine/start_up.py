"""What makes starts short: libraries are mapped beside imports, and nobody looks for garbage meanwhile."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread


def map_torch() -> None:
    """Has the libraries of torch mapped by a thread, which takes a fifth of a second and no interpreter lock. `import torch` finds them."""
    if (spec := importlib.util.find_spec("torch")) and spec.submodule_search_locations:
        Thread(target=_map, args=spec.submodule_search_locations, name="toolkit_lm-torch", daemon=True).start()


def _map(folder: str) -> None:
    # Where they have other names, or are missing, the import finds out.
    with suppress(OSError):
        # In the order and the mode in which torch loads them.
        ctypes.CDLL(f"{folder}/lib/libtorch_global_deps.so", mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(f"{folder}/lib/libtorch_python.so")


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For imports, and the making of models: many objects and hardly any garbage. Also a decorator."""
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
