"""Whether an engine has adapters. One without them refuses requests that name some."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.processing import RequestHalf

_OFF = "this engine has no adapters. Start it with the option lora.enabled=true."
KEYWORDS = ("lora_request",)
"""Keywords of `LLM.generate`."""
NAMES = ("lora", "toolkit_lm_lora")
"""Names of the plugin: installed, and given from code."""


def refusal(param: str) -> RequestError:
    """The error of a request that names an adapter where there are none."""
    return RequestError(_OFF, param)


def is_enabled(config: VllmConfig) -> bool:
    """Whether an option of the plugin asks for adapters, or the checkpoint brings one."""
    options: dict[str, Any] = {}
    for name in NAMES:
        options |= config.plugins.plugin_option.get(name, {})
    enabled = str(options.get("enabled", "")).lower() in ("true", "1", "on", "yes")
    asked = enabled or bool(options.get("modules")) or options.get("folder") is not None
    return asked or own_adapter(config) is not None


def own_adapter(config: VllmConfig) -> Path | None:
    """The folder of the adapter that a checkpoint of a model that hears brings with it, for
    requests with recordings. None: it brings none."""
    checkpoint = config.checkpoint
    if checkpoint is None or not checkpoint.hf_config.get("has_lora_adapter"):
        return None
    folder = Path(checkpoint.path)
    return folder if (folder / "adapter_config.json").is_file() else None


def is_disabled(config: VllmConfig) -> bool:
    """The opposite of `is_enabled`."""
    return not is_enabled(config)


class Refusing(RequestHalf):
    """Refuses keywords that name an adapter, as LoraParams refuses parameters."""

    keywords = KEYWORDS

    def keyword(self, name: str, value: Any) -> Mapping[str, str]:
        raise refusal(name)
