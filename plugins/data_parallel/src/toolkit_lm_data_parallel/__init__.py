"""Data parallel: several engines behind one front. This entry module only registers it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from toolkit_lm.plugin import EngineClientRegistry, hookimpl


class Options(Struct, frozen=True):
    """`--plugin-option data_parallel.NAME=...`"""

    max_moves: Annotated[int, Meta(ge=0)] = 2
    """How many engines may die under a request before it fails. It may be what they die of."""


@hookimpl
def toolkit_register_engine_clients(engine_clients: EngineClientRegistry) -> None:
    engine_clients.add("data_parallel", "toolkit_lm_data_parallel.start:start")
