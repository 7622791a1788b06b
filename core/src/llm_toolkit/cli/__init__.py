"""The command line: `toolkit`. Its commands, core's own included, come from plugins and are imported when they are invoked."""

from llm_toolkit.cli.app import main
from llm_toolkit.cli.options import engine_command
from llm_toolkit.cli.sampling import SamplingFlags

__all__ = ["SamplingFlags", "engine_command", "main"]
