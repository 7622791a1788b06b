"""Front half: how long a request's prompt is retained, and for whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Raw, Struct, msgpack
from toolkit_lm.messages import CacheKey, EngineRequest
from toolkit_lm.processing import RequestHalf
from toolkit_lm_serving import CLIENT

PART = "prefix_retention"
SECONDS = {"5m": 300.0, "in_memory": 600.0, "in-memory": 600.0, "1h": 3600.0, "24h": 86400.0}
"""Times by the names of OpenAI and Anthropic.
https://platform.openai.com/docs/guides/prompt-caching,
https://docs.anthropic.com/en/docs/build-with-claude/prompt-caching"""
KEY = "prompt_cache_key"
"""Key of a request's context: requests with the same value share a prefix."""


class Retention(Struct, frozen=True, array_like=True):
    """What a request asks for."""

    client: str
    seconds: float


class RetentionRequests(RequestHalf):
    """Reads the parameters."""

    def prepare(
        self, request: EngineRequest, arguments: Mapping[str, Any]
    ) -> tuple[Raw | None, list[CacheKey]]:
        if key := arguments.get("prompt_cache_key"):
            request.context = {**request.context, KEY: key}
        if (name := arguments.get("prompt_cache_retention")) is None:
            return None, []
        asked = Retention(request.context.get(CLIENT, ""), SECONDS[name])
        return Raw(msgpack.encode(asked)), []
