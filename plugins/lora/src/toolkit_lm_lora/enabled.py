"""Whether an engine has adapters. One without them refuses requests that name some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Raw
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import CacheKey, EngineRequest
from toolkit_lm.processing import RequestHalf

_OFF = "this engine has no adapters. Start it with the option lora.enabled=true."
KEYWORDS = ("lora_request",)
"""Keywords of `LLM.generate`."""
_NAMES = ("lora", "toolkit_lm_lora")
"""Names of the plugin: installed, and given from code."""


def is_enabled(config: VllmConfig) -> bool:
    """Whether an option of the plugin asks for adapters."""
    options: dict[str, Any] = {}
    for name in _NAMES:
        options |= config.plugins.plugin_option.get(name, {})
    enabled = str(options.get("enabled", "")).lower() in ("true", "1", "on", "yes")
    return enabled or bool(options.get("modules")) or options.get("folder") is not None


def is_disabled(config: VllmConfig) -> bool:
    """The opposite of `is_enabled`."""
    return not is_enabled(config)


class Refusing(RequestHalf):
    """Refuses requests that name an adapter."""

    keywords = KEYWORDS

    def prepare(
        self, request: EngineRequest, arguments: Mapping[str, Any]
    ) -> tuple[Raw | None, list[CacheKey]]:
        values = request.inputs.model_arguments.get("lora", {})
        if named := [name for name, value in values.items() if value]:
            raise RequestError(_OFF, named[0])
        return None, []

    def keyword(self, name: str, value: Any) -> Mapping[str, str]:
        raise RequestError(_OFF, name)
