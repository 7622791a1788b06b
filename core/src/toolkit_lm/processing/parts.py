"""RequestHalf: the half of a part that prepares, at the front, a request's share of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import CacheKey, EngineRequest


class RequestHalf:
    """One per front. Its module imports no torch. `prepare` may be called from several threads."""

    def __init__(self, config: VllmConfig, *, options: Any) -> None:
        """`config` is resolved. `options`: the plugin's own, or None."""

    def prepare(
        self, request: EngineRequest, given: Mapping[str, Any]
    ) -> tuple[Raw | None, list[CacheKey]]:
        """Called once for a request, before it is sent. `given`: the arguments of the parameters
        that the plugin registers under the part's name; empty where the client gave none.

        Returns the request's share, msgpack that becomes `request.inputs.parts[name]` (None: it has
        none), and what keys and values of its tokens depend on because of it. Raises ValueError for
        a request that cannot be served; as RequestError it may name the parameter.
        """
        return None, []
