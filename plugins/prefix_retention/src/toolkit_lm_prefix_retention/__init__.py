"""Prefix retention: requests ask to keep their prompt in the KV cache for some time. This entry
module only registers it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.plugin import LogitsProcessorRegistry, PartRegistry, hookimpl


class Options(Struct, frozen=True):
    """`--plugin-option prefix_retention.NAME=...`"""

    enabled: bool = False
    """Requests' hints have an effect."""
    share: Annotated[float, Meta(ge=0, le=1)] = 0.25
    """Largest part of the KV blocks that all requests together may retain."""
    client_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Largest part of these that one client may retain: an API key or an address."""


class RetentionParams(ProcessorParams):
    """Request parameters of retention."""

    changes_forward = False
    prompt_cache_key: Annotated[
        str | None,
        param(
            "Requests with the same key go to the same engine where there are several.",
            max_length=256,
            flag=False,
        ),
    ] = None
    prompt_cache_retention: Annotated[
        Literal["5m", "in_memory", "in-memory", "1h", "24h"] | None,
        param(
            "Time for which the prompt stays in the KV cache in preference to others: 5m, 1h, 24h, "
            "or in_memory for 10 minutes.",
            flag=False,
        ),
    ] = None

    kv_cache_retention_config: Annotated[
        dict[str, Any] | None,
        param(
            "Priorities of token ranges in the KV cache, as in TensorRT-LLM: "
            "token_range_retention_configs, decode_retention_priority and decode_duration_ms.",
            flag=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_cache_retention_config is not None:
            from toolkit_lm_prefix_retention.config import ranges_of

            ranges_of(self.kv_cache_retention_config)

    def prepare(self, renderer: Any) -> Mapping[str, Any] | None:
        from toolkit_lm_prefix_retention.enabled import is_enabled

        return super().prepare(renderer) if is_enabled(renderer.config) else None


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    processors.add("prefix_retention", None, params=RetentionParams)


@hookimpl
def toolkit_register_parts(parts: PartRegistry) -> None:
    parts.add(
        "prefix_retention",
        request="toolkit_lm_prefix_retention.front:RetentionRequests",
        planner="toolkit_lm_prefix_retention.planner:RetentionPlanner",
        for_model="toolkit_lm_prefix_retention.enabled:is_enabled",
    )
