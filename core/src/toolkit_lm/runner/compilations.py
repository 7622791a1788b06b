"""How often torch has compiled, which is to be over when the engine is ready."""

from __future__ import annotations

import sys


def num_compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process. 0 where nobody has imported it, which would take seconds."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo is not None else 0
