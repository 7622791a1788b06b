"""A front's side: the engine of another process, in place of one of its own."""

from __future__ import annotations

import signal
import socket

import msgspec
from toolkit_lm.config import VllmConfig
from toolkit_lm.engine import EngineClient, EngineProcess, ProcessClient
from toolkit_lm.errors import ConfigError, EngineDeadError
from toolkit_lm.plugin import Plugins

from toolkit_lm_fronts.meeting import Welcome, check_peer, read_line

_PATIENCE = 10.0
"""Seconds that the engine may take to answer."""


class SharedEngine(EngineProcess):
    """The process of an engine that others use too. A connection to it is the lifeline: either end
    hears when the other one is gone."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a socket that no engine of this user listens at."""
        self._path = path
        self.lifeline = socket.socket(socket.AF_UNIX)
        try:
            self.lifeline.settimeout(_PATIENCE)
            self.lifeline.connect(path)
            check_peer(self.lifeline)
            self._welcome = msgspec.json.decode(read_line(self.lifeline), type=Welcome)
            self.lifeline.settimeout(None)
        except (OSError, msgspec.DecodeError) as error:
            self.lifeline.close()
            raise ConfigError(
                f"fronts.engine: no engine answers at {path!r}: {error}. `toolkit engine MODEL "
                "--listen PATH` starts one."
            ) from error
        self.address = self._welcome.address

    @property
    def pid(self) -> int:
        return self._welcome.pid

    @property
    def is_alive(self) -> bool:
        # The lifeline tells.
        return self.lifeline.fileno() >= 0

    def disown_folder(self) -> None:
        """Does nothing: the folder is the engine's."""

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing: the engine is not this front's to signal."""

    def end(self) -> None:
        """Leaves the engine, which goes on for others."""
        self.lifeline.close()

    def death(self, phase: str | None) -> EngineDeadError:
        self.end()
        doing = "" if phase is None else f" while {phase}"
        return EngineDeadError(f"the engine at {self._path!r} has ended{doing}.")


def start(config: VllmConfig, plugins: Plugins) -> EngineClient | None:
    """A client of the engine that the options name; None where they name none. Raises
    ConfigError."""
    path = plugins.options("fronts").engine
    if path is None:
        return None
    if config.parallel.data_parallel_size > 1:
        raise ConfigError(
            "data_parallel_size: a front of a shared engine has that engine alone. Leave it out."
        )
    process = SharedEngine(path)
    try:
        return ProcessClient(config, plugins, process)
    except BaseException:
        process.end()
        raise
