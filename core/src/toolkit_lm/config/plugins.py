"""PluginsConfig: which plugins are loaded, and with what options."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Struct, field

from toolkit_lm.config.options import option


class PluginsConfig(Struct, frozen=True, kw_only=True):
    """Which plugins are loaded, and with what options."""

    plugins: Annotated[
        list[str] | None,
        option(
            "Plugins to load, and no others. If one of them fails, the start fails.",
            none="all that are installed",
        ),
    ] = None
    disable_plugins: Annotated[list[str], option("Plugins not to load.")] = field(
        default_factory=list
    )
    plugin_option: Annotated[
        dict[str, dict[str, Any]],
        option("Options of plugins: NAME.KEY=VALUE as a flag, a mapping in the file."),
    ] = field(default_factory=dict)
