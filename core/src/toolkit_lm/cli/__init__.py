"""The command line: `toolkit`. Its commands, core's own included, come from plugins and are imported when they are invoked."""

from toolkit_lm.cli.app import main, run
from toolkit_lm.cli.options import engine_command
from toolkit_lm.cli.sampling import SamplingFlags

__all__ = ["SamplingFlags", "engine_command", "main", "run"]
