"""HTTP: adapters as models, and routes that load and unload them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel
from toolkit_lm.errors import CheckpointError, ConfigError, RequestError, nearest
from toolkit_lm_server.aliases import Alias
from toolkit_lm_server.errors import ApiError

from toolkit_lm_lora.front import ADAPTER, LoraRequests
from toolkit_lm_lora.share import Reading

if TYPE_CHECKING:
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine

_POLL_SECONDS = 0.01


class LoadBody(BaseModel):
    """Body of /v1/load_lora_adapter."""

    model_config = {"extra": "forbid"}
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(BaseModel):
    """Body of /v1/unload_lora_adapter."""

    model_config = {"extra": "forbid"}
    lora_name: str
    lora_int_id: int | None = None


class AdapterNames:
    """The adapters as names of the model."""

    def __init__(self, requests: LoraRequests) -> None:
        self._requests = requests

    def find(self, name: str) -> Alias | None:
        known = self._requests.resolve(name)
        return None if known is None else Alias(known.path, {ADAPTER: name})

    def names(self) -> Iterable[str]:
        return list(self._requests.adapters)


class AdapterRoutes:
    """Handlers that load and unload adapters, for operators."""

    def __init__(self, engine: ServingEngine, requests: LoraRequests) -> None:
        self._engine = engine
        self._requests = requests
        self._lock = asyncio.Lock()

    async def load(self, body: LoadBody) -> PlainTextResponse:
        """Registers an adapter, once all workers have read it."""
        async with self._lock:
            known = body.lora_name in self._requests.adapters
            if known and not body.load_inplace:
                raise ApiError(
                    400,
                    f"The adapter {body.lora_name!r} is loaded. Give load_inplace to replace it.",
                    param="lora_name",
                )
            try:
                made = self._requests.made(body.lora_name, self._contained(body.lora_path))
                folder = await asyncio.to_thread(lambda: made.folder)
            except (CheckpointError, ConfigError, OSError) as error:
                raise RequestError(str(error), "lora_path") from error
            reading = Reading(folder.digest, str(folder.path))
            while True:
                answers = await self._engine.call_workers("lora.read", reading, list[str])
                if wrong := next((why for state, why in answers if state == "failed"), None):
                    raise RequestError(f"adapter {body.lora_name!r}: {wrong}", "lora_path")
                if all(state == "read" for state, _ in answers):
                    break
                await asyncio.sleep(_POLL_SECONDS)
            self._requests.add(made)
        return PlainTextResponse(f"Success: LoRA adapter '{made.name}' added successfully.")

    def _contained(self, path: str) -> str:
        """The path, which must be in the folder of the options."""
        folder = self._requests.options.folder
        if folder is None:
            raise ApiError(
                400,
                "Adapters are loaded out of the folder that the option lora.folder names, and it "
                "names none.",
                param="lora_path",
            )
        root = Path(folder).resolve()
        found = (root / path).resolve()
        if root not in found.parents:
            raise ApiError(
                400, f"lora_path: {path!r} is not in the folder of adapters.", param="lora_path"
            )
        return str(found)

    async def unload(self, body: UnloadBody) -> PlainTextResponse:
        """Forgets an adapter's name. Requests that run with it go on."""
        known = self._requests.adapters
        if body.lora_name not in known:
            raise ApiError(
                404,
                f"There is no adapter {body.lora_name!r}. {nearest(body.lora_name, known)}",
                param="lora_name",
            )
        self._requests.unregister(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def add_routes(router: APIRouter, engine: ServingEngine, api: OpenAIApi) -> None:
    """Adds the adapters' names, and the routes of operators, where the engine has adapters."""
    requests = engine.processor.parts.by_name.get("lora")
    if not isinstance(requests, LoraRequests):
        return
    api.engines.aliases.add(AdapterNames(requests))
    if not api.options.admin_routes:
        return
    routes = AdapterRoutes(engine, requests)
    for path, handler in (
        ("/v1/load_lora_adapter", routes.load),
        ("/v1/unload_lora_adapter", routes.unload),
    ):
        router.add_api_route(path, handler, methods=["POST"], response_class=PlainTextResponse)
