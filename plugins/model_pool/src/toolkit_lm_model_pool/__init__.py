"""Several models under one memory budget: `toolkit serve A B`, `toolkit serve --models FILE`. This
entry module only registers it."""

from __future__ import annotations

from toolkit_lm.plugin import hookimpl
from toolkit_lm_commands import CommandRegistry


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "serve",
        "toolkit_lm_model_pool.cli:serve",
        help="Serve a model, or several, over HTTP, with OpenAI's API.",
        override=True,
    )
    commands.add(
        "ps", "toolkit_lm_model_pool.remote:ps", help="Show the models of a running server."
    )
    commands.add(
        "load", "toolkit_lm_model_pool.remote:load", help="Load a model of a running server."
    )
    commands.add(
        "unload", "toolkit_lm_model_pool.remote:unload", help="Unload models of a running server."
    )
