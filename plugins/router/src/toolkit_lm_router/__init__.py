"""A router in front of several servers: the command `toolkit route`."""

from toolkit_lm.plugin import hookimpl
from toolkit_lm_commands import CommandRegistry


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "route",
        "toolkit_lm_router.cli:route",
        help="Route requests to several servers that speak OpenAI's API.",
    )
