from .options import (
    CommandFlags as CommandFlags,
    command_parameter as command_parameter,
    engine_command as engine_command,
    flag_help as flag_help,
    in_flags as in_flags,
)
from .plugin_flags import PluginFlags as PluginFlags
from .registry import (
    CommandEntry as CommandEntry,
    CommandRegistry as CommandRegistry,
    FlagNamesRegistry as FlagNamesRegistry,
)
from .servers import (
    HERE as HERE,
    Key as Key,
    Url as Url,
    ask_server as ask_server,
    columns as columns,
)
