"""A router in front of several servers: the command `toolkit route`. The part in a server computes
what another one has begun."""

from toolkit_lm.plugin import LogitsProcessorRegistry, hookimpl
from toolkit_lm_commands import CommandRegistry

from toolkit_lm_router.params import BegunParams


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    processors.add("begun", "toolkit_lm_router.begun:Begun", params=BegunParams)


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "route",
        "toolkit_lm_router.cli:route",
        help="Route requests to several servers that speak OpenAI's API.",
    )
