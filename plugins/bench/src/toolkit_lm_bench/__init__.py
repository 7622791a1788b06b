"""Measurements: the command `toolkit bench`."""

from toolkit_lm.plugin import CommandRegistry, hookimpl


@hookimpl
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add("bench", "toolkit_lm_bench.cli:app", help="Measure an installation.")
