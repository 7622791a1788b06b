"""What the entry module names: imported only when it is used."""

from llm_toolkit.cli import engine_command
from llm_toolkit.config import PluginsConfig
from llm_toolkit.plugin import Plugins


class GoodForCausalLM:
    pass


@engine_command(PluginsConfig)
def greet(name: str, config: PluginsConfig, plugins: Plugins) -> None:
    """Greet somebody."""
    options = plugins.options("good")
    print("\n".join([f"{options.greeting} {name}"] * options.times))
