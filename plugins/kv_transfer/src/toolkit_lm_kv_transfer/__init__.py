"""Prefill and decode apart: an engine offers the KV blocks of prompts to its peers, and fetches
those of theirs. This entry module only registers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct
from toolkit_lm.plugin import (
    KVTierRegistry,
    LogitsProcessorRegistry,
    PartRegistry,
    hookimpl,
)

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm.config import VllmConfig
    from toolkit_lm_commands import FlagNamesRegistry
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine


class Options(Struct, frozen=True):
    """`--plugin-option kv_transfer.NAME=...`"""

    listen: str | None = None
    """HOST:PORT at which peers fetch blocks of prompts that this engine has computed. Each rank has
    a port: PORT, PORT + 1 and so on."""
    advertise: str | None = None
    """HOST:PORT by which peers know that address. None: as in `listen`."""
    peers: list[str] | str = []
    """HOST:PORT of each engine that blocks may be fetched of, and of no other: a list, also with
    commas."""
    secret_file: str | None = None
    """File with the secret that all peers share. None: TOOLKIT_LM_KV_TRANSFER_SECRET holds it."""
    memory: str = "1GiB"
    """Most bytes of blocks that wait for peers, in host memory."""
    lease: Annotated[float, Meta(gt=0, le=86400)] = 60.0
    """Seconds that a block waits for a peer."""
    timeout: Annotated[float, Meta(gt=0, le=600)] = 5.0
    """Seconds without a block after which a peer counts as lost, and the prompt is computed."""

    def __post_init__(self) -> None:
        from toolkit_lm_kv_transfer.settings import check_options

        check_options(self)


@hookimpl
def toolkit_configure(config: VllmConfig, options: Options) -> VllmConfig | None:
    from toolkit_lm_kv_transfer.settings import check

    check(config, options)
    return None


@hookimpl
def toolkit_register_kv_tiers(kv_tiers: KVTierRegistry) -> None:
    kv_tiers.add(
        "kv_transfer",
        "toolkit_lm_kv_transfer.store:TransferStore",
        scheduler="toolkit_lm_kv_transfer.tier:TransferTier",
    )


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    from toolkit_lm_kv_transfer.front import TransferParams

    processors.add("kv_transfer", None, params=TransferParams)


@hookimpl
def toolkit_register_parts(parts: PartRegistry) -> None:
    parts.add(
        "kv_transfer",
        request="toolkit_lm_kv_transfer.front:TransferRequests",
        planner="toolkit_lm_kv_transfer.planner:TransferPlanner",
        worker="toolkit_lm_kv_transfer.worker:TransferPart",
        for_model="toolkit_lm_kv_transfer.settings:is_enabled",
    )


@hookimpl(optionalhook=True)
def toolkit_register_flag_names(flag_names: FlagNamesRegistry) -> None:
    flag_names.add("kv_transfer", "toolkit_lm_kv_transfer.flags:translate_flags")


@hookimpl(optionalhook=True)
def toolkit_register_routes(
    router: APIRouter, engine: ServingEngine, options: Any, api: OpenAIApi
) -> None:
    if api.metrics is None or (options.listen is None and not options.peers):
        return
    from toolkit_lm_kv_transfer.metrics import TransferFigures

    figures = TransferFigures(engine)
    api.metrics.registry.register(figures)
    api.metrics.sources.append(figures.ask)
