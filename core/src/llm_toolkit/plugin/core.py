"""What core itself brings, by the same hooks as any plugin: the commands of `toolkit`."""

from __future__ import annotations

from llm_toolkit.plugin.markers import hookimpl
from llm_toolkit.plugin.registry import CommandRegistry


@hookimpl
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add("generate", "llm_toolkit.cli.generate:generate", help="Complete a file of prompts, offline, as one batch.")
    commands.add("embed", "llm_toolkit.cli.embed:embed", help="Embed a file of texts, offline.")
    commands.add("complete", "llm_toolkit.cli.converse:complete", help="Complete a text, in this process or on a server.")
    commands.add("chat", "llm_toolkit.cli.converse:chat", help="Talk with a model, in this process or on a server.")
    commands.add("plugins", "llm_toolkit.cli.plugins:app", help="List the plugins, or show one of them.")
    commands.add("explain", "llm_toolkit.cli.explain:explain", help="Say what runs a model, and why each other candidate does not.")
    commands.add("env", "llm_toolkit.cli.env:env", help="Print the versions and the machine that a bug report needs.")
