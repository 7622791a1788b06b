"""Placement of engines: the devices that each one sees, and its own cores of the host."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress

from toolkit_lm.config import VllmConfig
from toolkit_lm.engine import EngineProcess
from toolkit_lm.errors import ConfigError

RANK = "TOOLKIT_LM_ENGINE_NUMBER"
"""Variable of an engine's process: its number."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def launch(config: VllmConfig, number: int) -> EngineProcess:
    """Starts the process of an engine, by its number. Raises ConfigError, EngineDeadError."""
    process = EngineProcess({RANK: str(number), **visible_devices(config, number, os.environ)})
    if hasattr(os, "sched_setaffinity"):
        # It has barely begun: no library has counted the cores. Where it has died, that is found
        # later.
        with suppress(OSError):
            os.sched_setaffinity(
                process.pid,
                share(os.sched_getaffinity(0), number, config.parallel.data_parallel_size),
            )
    return process


def visible_devices(config: VllmConfig, number: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that let an engine see its own GPUs, one for each of its ranks. Raises ConfigError
    for a device that they cannot share."""
    device = config.device.device
    count = config.parallel.num_ranks
    if device not in ("auto", "cuda", "cpu"):
        size = config.parallel.data_parallel_size
        raise ConfigError(
            f"device {device!r} is one device, and data_parallel_size is {size}. Engines can "
            "share: auto, cpu, cuda."
        )
    if device == "cpu":
        return {}
    first = number * count
    last = (number + 1) * count
    listed = environ.get(_VISIBLE)
    own = list(map(str, range(first, last))) if listed is None else listed.split(",")[first:last]
    if listed and len(own) < count:
        raise ConfigError(
            f"{_VISIBLE} is {listed!r}, and engine {number} needs {count} more "
            "(data_parallel_size is "
            f"{config.parallel.data_parallel_size}, of {count} each). Lower data_parallel_size, "
            "or set device to 'cpu'."
        )
    return {_VISIBLE: ",".join(own)}


def share(cores: Collection[int], number: int, size: int) -> set[int]:
    """Which of the host's cores an engine gets: neighbours, and no other's; all of them, where
    there are fewer than engines."""
    listed = sorted(cores)
    if len(listed) < size:
        return set(listed)
    return set(listed[len(listed) * number // size : len(listed) * (number + 1) // size])
