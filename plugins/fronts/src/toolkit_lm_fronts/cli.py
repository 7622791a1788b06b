"""The command `toolkit engine`."""

from __future__ import annotations

import os
import signal
from typing import Annotated

from msgspec import Struct
from toolkit_lm.config import VllmConfig, option
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import Plugins
from toolkit_lm_commands import engine_command


class EngineOptions(Struct, frozen=True, kw_only=True):
    """Options of an engine that several servers share."""

    listen: Annotated[
        str | None,
        option(
            "Path of the Unix socket at which servers find the engine.", none="it must be given"
        ),
    ] = None


@engine_command(EngineOptions)
def engine(config: VllmConfig, options: EngineOptions, plugins: Plugins) -> None:
    """Run an engine for several servers of this machine, which share it.

    Each server is given the socket's path, by --plugin-option fronts.engine=PATH, and the same
    options of the engine. Only this user's processes are let in. One that ends takes its requests
    and its pictures with it, and nothing of others.
    """
    if options.listen is None:
        raise ConfigError(
            "listen: name the path of a Unix socket, such as '/run/user/1000/e.sock'."
        )
    # They load torch.
    from toolkit_lm import LLMEngine
    from toolkit_lm_server.listening import bind_unix

    from toolkit_lm_fronts.hub import Hub

    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))
    with bind_unix(options.listen, 0o600) as listener:
        try:
            # Fronts may listen, whether a plugin here does or not.
            plugins.add_listener("fronts", lambda _: None)
            policy = config.scheduler.scheduling_policy or "fair"
            config = config.replace(engine_process=True, scheduling_policy=policy)
            made = LLMEngine(config, plugins=plugins, wait=False)
            try:
                print(f"Engine of {made.config.served_model_name} at {options.listen}", flush=True)
                Hub(made, listener).run(lambda: bool(stopped))
            finally:
                made.close()
        finally:
            os.unlink(options.listen)
