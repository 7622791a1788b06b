"""The command line: `toolkit`, and the commands that run a model, or tell what would run it and
what is installed.

Other commands come from other plugins. Each is imported when it is invoked. The library
`toolkit_lm_commands` has what they are made with.

The names are resolved when they are used: importing this package imports no parser.
"""

from types import ModuleType

import lazy_loader
from toolkit_lm.plugin import hookimpl
from toolkit_lm_commands.registry import CommandRegistry

from toolkit_lm_cli import hookspecs

# The names, and the modules that define them, stand in __init__.pyi. `dir()` does not list them:
# the loader of plugins looks at all that it lists in an entry module, which this module is too.
__getattr__, _, __all__ = lazy_loader.attach_stub(__name__, __file__)


@hookimpl
def toolkit_register_hookspecs() -> ModuleType:
    return hookspecs


@hookimpl
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "generate",
        "toolkit_lm_cli.generate:generate",
        help="Complete a file of prompts, offline, as one batch.",
    )
    commands.add("embed", "toolkit_lm_cli.embed:embed", help="Embed a file of texts, offline.")
    commands.add(
        "complete",
        "toolkit_lm_cli.converse:complete",
        help="Complete a text, in this process or on a server.",
    )
    commands.add(
        "chat",
        "toolkit_lm_cli.converse:chat",
        help="Talk with a model, in this process or on a server.",
    )
    commands.add(
        "explain",
        "toolkit_lm_cli.explain:explain",
        help="Show what runs a model, and why each other candidate does not.",
    )
    commands.add(
        "env",
        "toolkit_lm_cli.env:env",
        help="Print the versions and the machine that a bug report needs.",
    )
    commands.add("pull", "toolkit_lm_cli.hub:pull", help="Fetch a model from the hub.")
    commands.add(
        "list",
        "toolkit_lm_cli.hub:list_models",
        help="List the models of the hub that are on this machine.",
    )
    commands.add(
        "rm", "toolkit_lm_cli.hub:remove", help="Delete a model of the hub from this machine."
    )
    commands.add(
        "plugins list",
        "toolkit_lm_cli.plugins:list_plugins",
        help="List the plugins in load order, broken ones included.",
    )
    commands.add(
        "plugins show",
        "toolkit_lm_cli.plugins:show_plugin",
        help="Show all that is known of one plugin.",
    )
    commands.add(
        "plugins api",
        "toolkit_lm_cli.contracts:show_contract",
        help="Print a contract for plugin authors: a hook, or a public class.",
    )
