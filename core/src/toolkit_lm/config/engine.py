"""EngineConfig: how the engine's loop runs, and how it is watched."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from toolkit_lm.config.options import option


class EngineConfig(Struct, frozen=True, kw_only=True):
    """How the engine's loop runs, and how it is watched."""

    engine_process: Annotated[
        bool | None, option("Run the engine in a process of its own.", none="on, but off for LLM")
    ] = None
    overlap: Annotated[
        bool | None,
        option("Plan the next step while one is running. Results are the same.", none="off"),
    ] = None
    start_timeout: Annotated[
        float,
        option("Seconds that an engine process may take to load the model and warm up.", ge=0.1),
    ] = 1800.0
    step_timeout: Annotated[
        float, option("Seconds without progress after which the engine counts as stalled.", ge=0.1)
    ] = 120.0
    restart_engine: Annotated[
        int, option("Maximum number of restarts of an engine process that has died.", ge=0)
    ] = 0
