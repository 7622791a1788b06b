"""The command line: `toolkit`. Its commands, core's own included, come from plugins and are imported when they are invoked."""

from toolkit_lm.cli.app import main, run
from toolkit_lm.cli.options import CommandFlags, command_parameter, engine_command, flag_help

__all__ = ["CommandFlags", "command_parameter", "engine_command", "flag_help", "main", "run"]
