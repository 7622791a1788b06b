"""Starts an engine: in a process of its own, or in this one."""

from __future__ import annotations

from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.engine.client import EngineClient
from toolkit_lm.engine.process.launch import EngineProcess
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution.resolution import resolve_device


def start_engine(
    config: VllmConfig, plugins: Plugins, process: EngineProcess | None = None
) -> EngineClient:
    """Makes the engine client of a front: a plugin's, or one in a process of its own if
    `engine_process` says so. That engine may still be loading.

    `process`: a process that was started for it. Raises ConfigError for several engines if no
    plugin runs them.
    """
    # mypy: an abstract class stands for those that are made.
    kind: Any = EngineClient
    client: EngineClient | None = plugins.engine_clients.first_result(kind, config, plugins)
    if client is None and config.parallel.data_parallel_size > 1:
        raise ConfigError(
            (
                "no loaded plugin runs several engines (data_parallel_size). "
                f"{plugins.engine_clients.way_out}"
            ).rstrip()
        )
    if client is not None:
        if process is not None:
            process.end()
        return client
    if config.engine.engine_process:
        from toolkit_lm.engine.process.client import ProcessClient

        process = process or EngineProcess()
        try:
            return ProcessClient(config, plugins, process)
        except BaseException:
            process.end()
            raise
    if process is not None:
        process.end()
    # The import loads torch.
    from toolkit_lm.engine.in_process import InProcessClient

    return InProcessClient(resolve_device(config), plugins)
