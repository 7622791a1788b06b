"""The options of the app."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from msgspec import Struct
from toolkit_lm.config import VllmConfig, option, options_of
from toolkit_lm.errors import ConfigError, nearest
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_server.options import ServerOptions


class Scaling(Struct, frozen=True, kw_only=True):
    """How many engines there are, and the place of each."""

    min_replicas: Annotated[int, option("Fewest engines.", ge=1)] = 1
    max_replicas: Annotated[int, option("Most engines.", ge=1)] = 1
    cpus: Annotated[float, option("CPUs of an engine, or of each of its ranks.", gt=0)] = 1.0
    max_wait: Annotated[float, option("Most estimated seconds in the queue.", gt=0)] = 1.0
    max_fill: Annotated[float, option("Most used part of caches and batches.", gt=0, le=1)] = 0.8
    upscale_delay: Annotated[float, option("Seconds until more engines start.", ge=0)] = 10.0
    downscale_delay: Annotated[float, option("Seconds until engines end.", ge=0)] = 300.0
    drain_timeout: Annotated[float, option("Seconds that requests get to finish.", ge=0)] = 60.0

    def __post_init__(self) -> None:
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"scaling.max_replicas ({self.max_replicas}) must be at least "
                f"scaling.min_replicas ({self.min_replicas})."
            )


_ADDRESS = ("host", "port", "uds", "uds_mode", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
"""Options of an address: Ray Serve listens."""
_SET_HERE = {
    "server": (*_ADDRESS, "api_key", "api_keys_file", "ui", "shutdown_timeout", "drain_delay"),
    "router": (*_ADDRESS, "backend", "shutdown_timeout"),
    "scaling": (),
}
"""The groups of options, and the options of each that the app sets by itself."""


class Settings(NamedTuple):
    """Parts of the app: plain values, which Ray hands to the replicas."""

    engine: dict[str, Any]
    server: dict[str, Any]
    router: dict[str, Any]
    scaling: Scaling


def read(config: Mapping[str, Any]) -> Settings:
    """Checks a config. Raises ConfigError."""
    engine: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {name: {} for name in _SET_HERE}
    for name, value in config.items():
        group, dot, key = name.partition(".")
        if group not in groups:
            engine[name] = value
        elif dot:
            groups[group][key] = value
        elif isinstance(value, Mapping):
            groups[group].update(value)
        else:
            raise ConfigError(f"{name!r} must be a dict of options, not {value!r}.")
    if VllmConfig.make(**engine).parallel.data_parallel_size > 1:
        raise ConfigError("data_parallel_size: in place of it, the app has replicas.")
    server = _converted("server", ServerOptions, groups["server"])
    router = _converted("router", RouterOptions, groups["router"])
    scaling = _converted("scaling", Scaling, groups["scaling"])
    return Settings(engine, server, router, Scaling(**scaling))


def _converted(group: str, kind: type[Struct], values: Mapping[str, Any]) -> dict[str, Any]:
    known = {o.name: o for o in options_of(kind) if o.name not in _SET_HERE[group]}
    for name in values:
        if name in _SET_HERE[group]:
            raise ConfigError(f"{group}.{name} is not yours to set: Ray Serve, or the app, does.")
        if name not in known:
            raise ConfigError(f"unknown option '{group}.{name}'. {nearest(name, known)}")
    made = {name: known[name].convert(value, f"{group}.{name}") for name, value in values.items()}
    # Values that do not go together are refused.
    kind(**made)
    return made
