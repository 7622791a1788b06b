"""NamingRequests: the front half, by which a request's prompt gets a name. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Raw, json, msgpack
from toolkit_lm.messages import CacheKey, EngineRequest
from toolkit_lm.processing import RequestHalf

from toolkit_lm_kv_disk.share import SAVE, Save

if TYPE_CHECKING:
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine

    from toolkit_lm_kv_disk.saving import Saver


class NamingRequests(RequestHalf):
    """Reads the name from the request's context, which only the plugin's routes write."""

    def prepare(
        self, request: EngineRequest, arguments: Mapping[str, Any]
    ) -> tuple[Raw | None, list[CacheKey]]:
        if (text := request.context.get(SAVE)) is None:
            return None, []
        return Raw(msgpack.encode(json.decode(text, type=Save))), []

    def saver(self, engine: ServingEngine, api: OpenAIApi) -> Saver:
        """Returns what saves prefixes, for another API's routes."""
        from toolkit_lm_kv_disk.saving import Saver

        return Saver(engine, api)
