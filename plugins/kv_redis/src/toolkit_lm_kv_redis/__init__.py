"""A KV tier in Redis or Valkey. This entry module only registers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from toolkit_lm.plugin import KVTierRegistry, PartRegistry, hookimpl

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm.config import VllmConfig
    from toolkit_lm.model import Model
    from toolkit_lm_commands import FlagNamesRegistry
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine


class Options(Struct, frozen=True):
    """`--plugin-option kv_redis.NAME=...`"""

    url: str | None = None
    """Server for the KV blocks of cached prefixes, such as redis://host:6379/0, rediss://host:6379
    or unix:///path. Its password is in the variable TOOLKIT_LM_KV_REDIS_PASSWORD or in a file."""
    password_file: str | None = None
    """File with the server's password in its first line."""
    ca_file: str | None = None
    """File with the certificates that a rediss:// server is trusted by, instead of the system's."""
    ttl: int = 86400
    """Seconds after which the server forgets a block that was neither stored nor loaded again. 0:
    never."""
    namespace: str = "toolkit-lm"
    """First part of all keys."""
    write: Literal["through", "selective"] | None = None
    """Each block is written once it is computed, or once two requests had it. None: as kv_disk."""
    key_file: str | None = None
    """File with 32 bytes, the key that blocks are encrypted with. None: as kv_disk."""
    loads: Literal["measured", "always"] = "measured"
    """Blocks are loaded where that is faster than computing them, as measured, or always."""


@hookimpl
def toolkit_configure(config: VllmConfig, options: Options) -> VllmConfig | None:
    from toolkit_lm_kv_redis.limits import check

    check(config, options)
    return None


@hookimpl
def toolkit_register_kv_tiers(kv_tiers: KVTierRegistry) -> None:
    kv_tiers.add(
        "kv_redis",
        "toolkit_lm_kv_redis.store:RedisStore",
        scheduler="toolkit_lm_kv_redis.tier:RedisTier",
    )


@hookimpl
def toolkit_register_parts(parts: PartRegistry) -> None:
    parts.add(
        "kv_redis",
        planner="toolkit_lm_kv_tiers.planner:TierPlanner",
        worker="toolkit_lm_kv_tiers.worker:TierPart",
        for_model="toolkit_lm_kv_redis.limits:is_enabled",
    )


@hookimpl(optionalhook=True)
def toolkit_register_flag_names(flag_names: FlagNamesRegistry) -> None:
    flag_names.add("kv_redis", "toolkit_lm_kv_redis.flags:translate_flags")


@hookimpl(optionalhook=True)
def toolkit_register_routes(
    router: APIRouter, engine: ServingEngine, options: Options, api: OpenAIApi
) -> None:
    if api.metrics is None or options.url is None:
        return
    from toolkit_lm_kv_tiers.metrics import show

    show(api, engine, "kv_redis")


@hookimpl(optionalhook=True)
def toolkit_explain(
    config: VllmConfig, models: Sequence[Model], options: Any
) -> Mapping[str, Sequence[str]] | None:
    if options.url is None:
        return None
    from toolkit_lm_kv_redis.limits import explain

    return explain(config, options)
