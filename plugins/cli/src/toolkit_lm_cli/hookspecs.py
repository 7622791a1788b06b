"""The hooks that this plugin brings, and the registries that they fill.

Thread: main.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from toolkit_lm.plugin import hookimpl, hookspec
from toolkit_lm_commands.registry import CommandRegistry, FlagNamesRegistry

if TYPE_CHECKING:
    from toolkit_lm.config import VllmConfig
    from toolkit_lm.model import Model


@hookimpl
def toolkit_register_hookspecs() -> ModuleType:
    """This module is a plugin, too: where the rest of the distribution's is left out."""
    return sys.modules[__name__]


@hookspec
def toolkit_register_commands(commands: CommandRegistry) -> None:
    """Registers sub-commands of `toolkit`. The names "plugins list" and "plugins new" make a group,
    `toolkit plugins`.

    Caller: the loader. Process: every one, though only the command line uses them. Return: nothing;
    all implementations are called.
    """


@hookspec
def toolkit_register_flag_names(flag_names: FlagNamesRegistry) -> None:
    """Registers translators of flags as other projects name them.

    Caller: the loader. Process: every one, though only the command line uses them. Return: nothing;
    all implementations are called.
    """


@hookspec
def toolkit_explain(
    config: VllmConfig, models: Sequence[Model], options: Any
) -> Mapping[str, Sequence[str]] | None:
    """Adds rows to `toolkit explain`: lines by the row's name. `config` is resolved. `models`: each
    rank's model, on the device "meta": without weights. `options`: the plugin's own, or None.

    Caller: `toolkit explain`, once. Process: the command's. Return: a mapping, or None; all
    implementations are called.
    """


REGISTRIES = {
    "toolkit_register_commands": CommandRegistry,
    "toolkit_register_flag_names": FlagNamesRegistry,
}
"""Registry that the loader fills for each hook."""
