"""What core itself brings, by the same hooks as any plugin: the commands of `toolkit`."""

from __future__ import annotations

from toolkit_lm.plugin.markers import hookimpl
from toolkit_lm.plugin.registry import CommandRegistry


@hookimpl
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add("generate", "toolkit_lm.cli.generate:generate", help="Complete a file of prompts, offline, as one batch.")
    commands.add("embed", "toolkit_lm.cli.embed:embed", help="Embed a file of texts, offline.")
    commands.add("complete", "toolkit_lm.cli.converse:complete", help="Complete a text, in this process or on a server.")
    commands.add("chat", "toolkit_lm.cli.converse:chat", help="Talk with a model, in this process or on a server.")
    commands.add("plugins", "toolkit_lm.cli.plugins:app", help="List the plugins, or show one of them.")
    commands.add("explain", "toolkit_lm.cli.explain:explain", help="Say what runs a model, and why each other candidate does not.")
    commands.add("env", "toolkit_lm.cli.env:env", help="Print the versions and the machine that a bug report needs.")
