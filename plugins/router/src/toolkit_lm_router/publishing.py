"""Servers that publish KV events for a router, where one program starts them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, PluginError
from toolkit_lm.plugin import Plugins

_PLUGIN = "kv_events"
_FREE = "tcp://*:0"
"""A free port on all interfaces."""

Options = dict[str, Any]
"""Options by name."""


def publishing(engine: Mapping[str, Any], server: Mapping[str, Any]) -> tuple[Options, Options]:
    """The options of an engine and of its server, with those by which a router follows its KV
    events. It publishes at free ports, where its own options don't name others. Raises ConfigError
    where they forbid it."""
    plugins = VllmConfig.make(**engine).plugins
    try:
        Plugins.load(plugins).options_class(_PLUGIN)
    except PluginError as error:
        raise ConfigError(f"router.kv_events: {error}") from error
    before = plugins.plugin_option
    own = {"enabled": True, "endpoint": _FREE, "replay_endpoint": _FREE, **before.get(_PLUGIN, {})}
    made = {**engine, "plugin_option": {**before, _PLUGIN: own}}
    if not Plugins.load(VllmConfig.make(**made).plugins).options(_PLUGIN).enabled:
        raise ConfigError(
            "kv_events.enabled is false, and router.kv_events follows the events. Leave one of "
            "them out."
        )
    if not server.get("admin_routes", True):
        raise ConfigError(
            "server.admin_routes is false, and router.kv_events asks engines for such a route. "
            "Leave one of them out: only the router has the engines' key."
        )
    return made, {**server, "admin_routes": True}
