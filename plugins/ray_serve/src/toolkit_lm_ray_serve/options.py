"""The options of the app."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Struct
from toolkit_lm.config import VllmConfig, load_options, option, options_of
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import Plugins
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_router.publishing import publishing
from toolkit_lm_server.options import ServerOptions


class Scaling(Struct, frozen=True, kw_only=True):
    """How many engines and fronts there are, and the place of each."""

    min_replicas: Annotated[int, option("Fewest engines.", ge=1)] = 1
    max_replicas: Annotated[int, option("Most engines.", ge=1)] = 1
    num_fronts: Annotated[int, option("Fronts, each of which takes requests.", ge=1)] = 1
    cpus: Annotated[float, option("CPUs of an engine, or of each of its ranks.", gt=0)] = 1.0
    max_wait: Annotated[float, option("Most estimated seconds in the queue.", gt=0)] = 1.0
    max_fill: Annotated[float, option("Most used part of caches and batches.", gt=0, le=1)] = 0.8
    upscale_delay: Annotated[float, option("Seconds until more engines start.", ge=0)] = 10.0
    downscale_delay: Annotated[float, option("Seconds until engines end.", ge=0)] = 300.0
    drain_timeout: Annotated[float, option("Seconds that requests get to finish.", ge=0)] = 60.0


_GROUPS = {"server": ServerOptions, "router": RouterOptions, "scaling": Scaling}
_ADDRESS = ("host", "port", "uds", "uds_mode", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
"""Options of an address: Ray Serve listens."""
_SET_HERE = {
    "server": {*_ADDRESS, "api_key", "api_keys_file", "ui", "shutdown_timeout", "drain_delay"},
    "router": {*_ADDRESS, "backend", "shutdown_timeout"},
}
"""The options of each group that the app sets by itself."""


def read(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options by group: those of `engine`, `server`, `router` and `scaling`. They are plain
    values, which Ray hands to the replicas. Raises ConfigError."""
    groups: dict[str, dict[str, Any]] = {group: {} for group in ("engine", *_GROUPS)}
    for name, value in config.items():
        group, dot, key = name.partition(".")
        if group not in _GROUPS:
            groups["engine"][name] = value
        elif dot:
            groups[group][key] = value
        elif isinstance(value, Mapping):
            groups[group].update(value)
        else:
            raise ConfigError(f"{name!r} must be a dict of options, not {value!r}.")
    groups["engine"] = _of_engine(groups["engine"])
    groups |= {group: _checked(group, groups[group]) for group in _GROUPS}
    if groups["router"].get("kv_events"):
        groups["engine"], groups["server"] = publishing(groups["engine"], groups["server"])
    return groups


def _of_engine(options: dict[str, Any]) -> dict[str, Any]:
    """The engine's options by our names. vLLM's are tried only if ours fail."""
    try:
        config = VllmConfig.make(**options)
    except ConfigError:
        options = Plugins.load(VllmConfig.make().plugins).option_names.translate(options)
        config = VllmConfig.make(**options)
    if config.parallel.data_parallel_size > 1:
        raise ConfigError("data_parallel_size: in place of it, the app has replicas.")
    return options


def _checked(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    if refused := values.keys() & _SET_HERE.get(group, set()):
        raise ConfigError(f"{group}.{min(refused)} is not yours to set: Ray Serve or the app does.")
    kind = _GROUPS[group]
    made = load_options(options_of(kind), values, named=lambda option: f"{group}.{option.name}")
    # Values that do not go together are refused.
    kind(**made)
    return made
