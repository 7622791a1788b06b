"""vLLM's weight_transfer_config, in an option of the plugin rl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from toolkit_lm_vllm_names.values import parsed

_BACKENDS = ("nccl", "gloo")


class WeightTransferConfig(Struct, kw_only=True):
    """Way by which a trainer sends weights to an engine."""

    backend: str = "nccl"


def weight_transfer_config(value: Any) -> dict[str, Any]:
    """Converts a mapping, a WeightTransferConfig, or JSON. Raises ValueError."""
    found = parsed(value)
    if isinstance(found, WeightTransferConfig):
        found = {"backend": found.backend}
    if not isinstance(found, Mapping):
        raise ValueError("it is a mapping, with backend.")
    if unknown := sorted(found.keys() - {"backend"}):
        raise ValueError(f"it has no key {unknown[0]!r}. Known: backend.")
    if (backend := found.get("backend", "nccl")) not in _BACKENDS:
        raise ValueError(f"backend {backend!r} is none of {', '.join(_BACKENDS)}.")
    return {"plugin_option": {"rl": {"weight_transfer": "gloo"}}}
