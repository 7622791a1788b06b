"""Counter of torch's compilations in this process, whoever starts them. Imports nothing."""

from __future__ import annotations

import sys


def num_compiled() -> int:
    """Graphs that `torch.compile` has traced so far, in any thread."""
    # Importing it would take seconds, where nobody compiles.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
