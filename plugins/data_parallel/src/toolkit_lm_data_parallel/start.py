"""Starts several engines where a config asks for them."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig
from toolkit_lm.engine import EngineClient
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import Plugins


def start(config: VllmConfig, plugins: Plugins) -> EngineClient | None:
    """A client of `data_parallel_size` engines, which may still be loading; None where that is one.
    Raises ConfigError."""
    if config.parallel.data_parallel_size == 1:
        return None
    if config.engine.engine_process is False:
        raise ConfigError(
            f"data_parallel_size is {config.parallel.data_parallel_size}, and engine_process is "
            "False: several engines run in processes of "
            "their own. Leave engine_process out, or set data_parallel_size to 1."
        )
    # It brings ZeroMQ along.
    from toolkit_lm_data_parallel.client import DataParallelClient

    return DataParallelClient(config, plugins, plugins.options("data_parallel").max_moves)
