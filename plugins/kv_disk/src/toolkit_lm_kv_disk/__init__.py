"""KV tiers in host memory and on disk. This entry module only registers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from toolkit_lm.plugin import KVTierRegistry, PartRegistry, hookimpl

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm.config import VllmConfig
    from toolkit_lm.model import Model
    from toolkit_lm_commands import CommandRegistry, FlagNamesRegistry
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine


class Options(Struct, frozen=True):
    """`--plugin-option kv_disk.NAME=...`"""

    dir: str | None = None
    """Folder for the KV blocks of cached prefixes. They are found again after a restart."""
    disk: str | None = None
    """Most bytes in this folder. None: 20GiB."""
    host: str | None = None
    """Most bytes of evicted KV blocks in host memory."""
    write: Literal["through", "selective"] = "through"
    """Each block is written to the folder once it is computed, or once two requests had it."""
    key_file: str | None = None
    """File with 32 bytes, the key that blocks in the folder are encrypted with."""
    loads: Literal["measured", "always"] = "measured"
    """Blocks are loaded where that is faster than computing them, as measured, or always."""

    def __post_init__(self) -> None:
        from toolkit_lm_kv_disk.limits import check_sizes

        check_sizes(self)


@hookimpl
def toolkit_configure(config: VllmConfig, options: Options) -> VllmConfig | None:
    from toolkit_lm_kv_disk.limits import check

    check(config, options)
    return None


@hookimpl
def toolkit_register_kv_tiers(kv_tiers: KVTierRegistry) -> None:
    kv_tiers.add(
        "kv_host",
        "toolkit_lm_kv_disk.host:HostBlocks",
        scheduler="toolkit_lm_kv_disk.tier:HostTier",
    )
    kv_tiers.add(
        "kv_disk",
        "toolkit_lm_kv_disk.store:DiskStore",
        scheduler="toolkit_lm_kv_disk.tier:DiskTier",
    )


@hookimpl
def toolkit_register_parts(parts: PartRegistry) -> None:
    parts.add(
        "kv_disk",
        request="toolkit_lm_kv_disk.front:NamingRequests",
        planner="toolkit_lm_kv_disk.planner:NamingPlanner",
        worker="toolkit_lm_kv_tiers.worker:TierPart",
        for_model="toolkit_lm_kv_disk.limits:is_enabled",
    )


@hookimpl(optionalhook=True)
def toolkit_register_flag_names(flag_names: FlagNamesRegistry) -> None:
    flag_names.add("kv_disk", "toolkit_lm_kv_disk.flags:translate_flags")


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "kv save",
        "toolkit_lm_kv_disk.cli:save",
        help="Compute a prefix on a running server, and keep it on its disk under a name.",
    )
    commands.add(
        "kv list",
        "toolkit_lm_kv_disk.cli:list_prefixes",
        help="List the named prefixes of a running server.",
    )
    commands.add(
        "kv drop",
        "toolkit_lm_kv_disk.cli:drop",
        help="Drop named prefixes of a running server, or what a KV tier has.",
    )


@hookimpl(optionalhook=True)
def toolkit_register_routes(
    router: APIRouter, engine: ServingEngine, options: Options, api: OpenAIApi
) -> None:
    if options.dir is None and options.host is None:
        return
    if api.options.admin_routes:
        from toolkit_lm_kv_disk.routes import add_routes

        add_routes(router, engine, api)
    if api.metrics is None:
        return
    from toolkit_lm_kv_tiers.metrics import show

    show(api, engine, "kv_disk")


@hookimpl(optionalhook=True)
def toolkit_explain(
    config: VllmConfig, models: Sequence[Model], options: Any
) -> Mapping[str, Sequence[str]] | None:
    if options.dir is None and options.host is None:
        return None
    from toolkit_lm_kv_disk.explaining import explain

    return explain(config, options)
