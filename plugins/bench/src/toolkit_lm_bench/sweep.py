"""`toolkit bench sweep`: a server under one load after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toolkit_lm.errors import ConfigError

from toolkit_lm_bench.options import Load, concurrency, request_rate
from toolkit_lm_bench.serve import Served, SweepSetup, serve


def make_loads(concurrencies: str | None, request_rates: str | None) -> list[Load]:
    """From comma-separated lists, of which one is given. Raises ConfigError."""
    if (concurrencies is None) == (request_rates is None):
        raise ConfigError(
            "give either option 'concurrencies' or option 'request_rates', such as "
            "--concurrencies 1,2,4,8."
        )
    if concurrencies is not None:
        return [
            Load(concurrency=concurrency(text.strip(), "concurrencies"))
            for text in concurrencies.split(",")
        ]
    assert request_rates is not None
    return [Load(request_rate(text.strip(), "request_rates")) for text in request_rates.split(",")]


def sweep(plan: SweepSetup, loads: Sequence[Load]) -> Iterator[Served]:
    """Measures loads in order, each with prompts of its own. Raises ToolkitError."""
    for index, load in enumerate(loads):
        yield serve(plan, load, index=index)
