"""Target of the entry module: imported only when it is used."""

from toolkit_lm.config import PluginsConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm_commands import engine_command


class GoodForCausalLM:
    pass


@engine_command(PluginsConfig)
def greet(name: str, config: PluginsConfig, plugins: Plugins) -> None:
    """Greet somebody."""
    options = plugins.options("good")
    print("\n".join([f"{options.greeting} {name}"] * options.times))
