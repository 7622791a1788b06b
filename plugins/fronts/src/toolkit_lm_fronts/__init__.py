"""One engine for several servers of a machine: the command `toolkit engine`, and what has a server
use such an engine."""

from __future__ import annotations

from msgspec import Struct
from toolkit_lm.plugin import EngineClientRegistry, hookimpl
from toolkit_lm_commands import CommandRegistry


class Options(Struct, frozen=True):
    """`--plugin-option fronts.NAME=...`"""

    engine: str | None = None
    """Path of the socket of an engine that `toolkit engine` runs. None: an engine of its own."""


@hookimpl
def toolkit_register_engine_clients(engine_clients: EngineClientRegistry) -> None:
    engine_clients.add("fronts", "toolkit_lm_fronts.client:start")


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "engine",
        "toolkit_lm_fronts.cli:engine",
        help="Run an engine for several servers of this machine.",
    )
