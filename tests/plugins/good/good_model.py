"""A third party's plugin as it should be: one light module, with its targets in another."""

from msgspec import Struct
from toolkit_lm.plugin import ModelRegistry, hookimpl
from toolkit_lm_commands import CommandRegistry


class Options(Struct):
    greeting: str = "hello"
    """Word to say."""
    times: int = 1


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add("GoodForCausalLM", "good_model_target:GoodForCausalLM")


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add("greet", "good_model_target:greet", help="Greet somebody.")
