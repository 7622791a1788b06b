"""KV cache events: tells routers which prefixes an engine holds, in vLLM's wire format. This entry
module only registers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import PartRegistry, hookimpl

from toolkit_lm_kv_events.endpoints import DEFAULT, parse

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine


class Options(Struct, frozen=True):
    """`--plugin-option kv_events.NAME=...`"""

    enabled: bool = False
    """Engines publish the events of their KV caches."""
    endpoint: str = DEFAULT
    """Address of the ZeroMQ PUB socket: tcp://HOST:PORT or ipc://PATH. The hosts *, localhost and
    addresses of the loopback interface are bound. Other hosts are connected to. Engine n of several
    adds n to the port. Port 0 is a free one, which /kv_event_sources tells."""
    replay_endpoint: str | None = None
    """Address of the ROUTER socket that sends missed batches again; it is bound. None: there is
    none."""
    buffer_steps: Annotated[int, Meta(ge=1, le=10**7)] = 10_000
    """Most batches that are kept for replays."""
    buffer_mib: Annotated[float, Meta(gt=0)] = 256.0
    """Most MiB of batches that are kept for replays."""
    hwm: Annotated[int, Meta(ge=1, le=10**7)] = 10_000
    """Most batches that wait for one subscriber. It misses what comes beyond."""
    max_queue_size: Annotated[int, Meta(ge=1, le=10**7)] = 100_000
    """Most events that wait to be published. Beyond it, subscribers are told that the cache is
    empty."""
    topic: Annotated[str, Meta(max_length=256)] = ""
    """First frame of each message, by which subscribers filter."""

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            if (value := getattr(self, name)) is None:
                continue
            try:
                found = parse(value)
            except ValueError as error:
                raise ConfigError(f"kv_events.{name}: {error}") from None
            if name == "replay_endpoint" and not found.binds:
                raise ConfigError(
                    f"kv_events.replay_endpoint: {value!r} names another machine, and the socket "
                    "is bound. Use tcp://*:PORT, tcp://127.0.0.1:PORT or ipc://PATH."
                )
        if self.endpoint == self.replay_endpoint and parse(self.endpoint).port != 0:
            raise ConfigError(
                f"kv_events: endpoint and replay_endpoint are both {self.endpoint!r}. Give them "
                "different ports."
            )


@hookimpl
def toolkit_register_parts(parts: PartRegistry) -> None:
    parts.add(
        "kv_events",
        planner="toolkit_lm_kv_events.planner:KvEventsPlanner",
        for_model="toolkit_lm_kv_events.endpoints:is_enabled",
    )


@hookimpl(optionalhook=True)
def toolkit_register_routes(
    router: APIRouter, engine: ServingEngine, options: Options, api: OpenAIApi
) -> None:
    if api.options.admin_routes:
        from toolkit_lm_kv_events.routes import add_routes

        add_routes(router, engine)
