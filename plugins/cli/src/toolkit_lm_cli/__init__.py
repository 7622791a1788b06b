"""Commands that run a model, or tell what would run it: `toolkit generate`, `embed`, `complete`, `chat`, `explain` and `env`."""

from toolkit_lm.plugin import CommandRegistry, hookimpl


@hookimpl
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add("generate", "toolkit_lm_cli.generate:generate", help="Complete a file of prompts, offline, as one batch.")
    commands.add("embed", "toolkit_lm_cli.embed:embed", help="Embed a file of texts, offline.")
    commands.add("complete", "toolkit_lm_cli.converse:complete", help="Complete a text, in this process or on a server.")
    commands.add("chat", "toolkit_lm_cli.converse:chat", help="Talk with a model, in this process or on a server.")
    commands.add("explain", "toolkit_lm_cli.explain:explain", help="Show what runs a model, and why each other candidate does not.")
    commands.add("env", "toolkit_lm_cli.env:env", help="Print the versions and the machine that a bug report needs.")
