"""OpenAI-compatible HTTP server: the command `toolkit serve`, and routes for other FastAPI apps."""

from types import ModuleType

from llm_toolkit.plugin import CommandRegistry, hookimpl

from llm_toolkit_server import hookspecs


@hookimpl
def toolkit_register_hookspecs() -> ModuleType:
    return hookspecs


@hookimpl
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add("serve", "llm_toolkit_server.cli:serve", help="Serve a model over HTTP, with OpenAI's API.")
