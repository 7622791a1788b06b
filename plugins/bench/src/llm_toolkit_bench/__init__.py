"""Measurements: the command `toolkit bench`."""

from llm_toolkit.plugin import CommandRegistry, hookimpl


@hookimpl
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add("bench", "llm_toolkit_bench.cli:app", help="Measure an installation.")
