"""Front half: how long a request's prompt is retained, and for whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Raw, Struct, msgpack
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import CacheKey, EngineRequest
from toolkit_lm.processing import RequestHalf
from toolkit_lm_serving import CLIENT

from toolkit_lm_prefix_retention.config import FIELD, Range, ranges_of

PART = "prefix_retention"
SECONDS = {"5m": 300.0, "in_memory": 600.0, "in-memory": 600.0, "1h": 3600.0, "24h": 86400.0}
"""Times by the names of OpenAI and Anthropic.
https://platform.openai.com/docs/guides/prompt-caching,
https://docs.anthropic.com/en/docs/build-with-claude/prompt-caching"""
KEY = "prompt_cache_key"
"""Key of a request's context: requests with the same value share a prefix."""


_FIRST = 100
"""Priority of prompts that only state a time."""


class Retention(Struct, frozen=True, array_like=True):
    """What a request asks for."""

    client: str
    ranges: list[Range]
    """Of the prompt."""
    decode: Range | None
    """Priority and time of the generated tokens; None: theirs is the default."""


class RetentionRequests(RequestHalf):
    """Reads the parameters."""

    def prepare(
        self, request: EngineRequest, arguments: Mapping[str, Any]
    ) -> tuple[Raw | None, list[CacheKey]]:
        if key := arguments.get("prompt_cache_key"):
            request.context = {**request.context, KEY: key}
        ranges, decode = ranges_of(arguments.get(FIELD) or {})
        if (name := arguments.get("prompt_cache_retention")) is not None:
            if ranges:
                raise RequestError(
                    f"{FIELD} has ranges, so prompt_cache_retention has no place: give one of "
                    "them.",
                    FIELD,
                )
            ranges = [Range(0, None, _FIRST, SECONDS[name])]
        if not ranges and decode is None:
            return None, []
        asked = Retention(request.context.get(CLIENT, ""), ranges, decode)
        return Raw(msgpack.encode(asked)), []
