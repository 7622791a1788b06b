"""HTTP: adapters as models, and routes that load and unload them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel
from toolkit_lm.errors import CheckpointError, ConfigError, RequestError, ToolkitError, nearest
from toolkit_lm_server.aliases import Alias
from toolkit_lm_server.caller import CALLER
from toolkit_lm_server.errors import ApiError
from toolkit_lm_serving import ADAPTER

from toolkit_lm_lora.front import LoraRequests, Registered, checked_scale
from toolkit_lm_lora.metrics import LoraFigures
from toolkit_lm_lora.resolvers import contains
from toolkit_lm_lora.share import Reading

if TYPE_CHECKING:
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine

_POLL_SECONDS = 0.01
_DRAIN_POLL_SECONDS = 0.1


class LoadBody(BaseModel):
    """Body of /v1/load_lora_adapter."""

    model_config = {"extra": "forbid"}
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    pin: bool = False


class UnloadBody(BaseModel):
    """Body of /v1/unload_lora_adapter."""

    model_config = {"extra": "forbid"}
    lora_name: str
    lora_int_id: int | None = None


class SglangLoadBody(BaseModel):
    """Body of /load_lora_adapter."""

    model_config = {"extra": "forbid"}
    lora_name: str
    lora_path: str
    pinned: bool = False


class SglangUnloadBody(BaseModel):
    """Body of /unload_lora_adapter."""

    model_config = {"extra": "forbid"}
    lora_name: str


class AdapterScale(BaseModel):
    """An entry of the body of /lora-adapters."""

    model_config = {"extra": "forbid", "strict": True}
    id: int
    scale: float


class AdapterNames:
    """The adapters as names of the model."""

    def __init__(self, requests: LoraRequests) -> None:
        self._requests = requests

    def find(self, name: str) -> Alias | None:
        known = self._requests.may_have(name)
        if not known:
            return None
        # A resolver finds it when a request is prepared.
        return Alias(known.path if isinstance(known, Registered) else None, {ADAPTER: name})

    def names(self) -> Iterable[str]:
        return list(self._requests.adapters)


class AdapterRoutes:
    """Handlers that load and unload adapters, for operators. A key that is limited to some adapters
    loads and unloads no others."""

    def __init__(self, engine: ServingEngine, requests: LoraRequests) -> None:
        self._engine = engine
        self._requests = requests
        self._lock = asyncio.Lock()
        self._draining: set[asyncio.Task[None]] = set()

    async def load(self, body: LoadBody) -> PlainTextResponse:
        """Registers an adapter, once all workers have read it."""
        name = body.lora_name
        if not CALLER.get().may_use(name):
            raise ApiError(400, f"The key may not have an adapter {name!r}.", param="lora_name")
        async with self._lock:
            known = self._requests.adapters.get(name)
            if known is not None and not body.load_inplace:
                raise ApiError(
                    400,
                    f"The adapter {name!r} is loaded. Give load_inplace to replace it.",
                    param="lora_name",
                )
            try:
                path = await asyncio.to_thread(self._contained, name, body.lora_path)
                made = self._requests.made(name, path, pinned=body.pin)
                folder = await asyncio.to_thread(lambda: made.folder)
            except (CheckpointError, ConfigError, OSError) as error:
                raise RequestError(str(error), "lora_path") from error
            await self._read(name, Reading(folder.digest, str(folder.path), made.pinned))
            self._requests.add(made)
        if known is not None:
            self._drain(known)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _read(self, name: str, reading: Reading) -> None:
        """Has all workers read an adapter. One that a worker cannot read stays with none."""
        while True:
            answers = await self._engine.call_workers("lora.read", reading, list[str])
            if wrong := next((why for state, why in answers if state == "failed"), None):
                await self._forget(reading.digest)
                raise RequestError(f"adapter {name!r}: {wrong}", "lora_path")
            if all(state == "read" for state, _ in answers):
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _contained(self, name: str, path: str) -> str:
        """The path, which must be in the folder of the options. Raises ApiError and ConfigError."""
        folder = self._requests.options.folder
        if folder is None:
            raise ApiError(
                400,
                "Adapters are loaded out of the folder that the option lora.folder names, and it "
                "names none.",
                param="lora_path",
            )
        root = Path(folder).resolve()
        found = (root / path.replace("\0", "")).resolve()
        if root not in found.parents or not contains(root, found):
            raise ApiError(
                400, f"lora_path: {path!r} is not in the folder of adapters.", param="lora_path"
            )
        if not CALLER.get().may_use(found.relative_to(root).parts[0]):
            # The error is that of a folder that does not exist.
            raise ConfigError(f"adapter {name!r}: there is no folder {str(found)!r}.")
        return str(found)

    async def unload(self, body: UnloadBody) -> PlainTextResponse:
        """Forgets an adapter's name. Requests that run with it go on. It leaves the memory when the
        last of them has ended."""
        known = [name for name in self._requests.adapters if CALLER.get().may_use(name)]
        if body.lora_name not in known:
            raise ApiError(
                404,
                f"There is no adapter {body.lora_name!r}. {nearest(body.lora_name, known)}",
                param="lora_name",
            )
        self._drain(self._requests.unregister(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def sglang_load(self, body: SglangLoadBody) -> dict[str, Any]:
        """Registers an adapter, as SGLang does."""
        await self.load(
            LoadBody(lora_name=body.lora_name, lora_path=body.lora_path, pin=body.pinned)
        )
        return self._listed()

    async def sglang_unload(self, body: SglangUnloadBody) -> dict[str, Any]:
        """Forgets an adapter's name, as SGLang does."""
        await self.unload(UnloadBody(lora_name=body.lora_name))
        return self._listed()

    def _listed(self) -> dict[str, Any]:
        may_use = CALLER.get().may_use
        adapters = self._requests.adapters
        loaded = {name: known.path for name, known in adapters.items() if may_use(name)}
        return {"success": True, "loaded_adapters": loaded, "error_message": ""}

    async def listed(self) -> list[dict[str, Any]]:
        """The adapters that the caller may use, as llama.cpp lists them."""
        requests = self._requests
        return [
            {
                "id": number,
                "name": name,
                "path": requests.adapters[name].path,
                "scale": requests.scales.get(name, 0.0),  # nosec B113
            }
            for name, number in requests.numbered(CALLER.get().adapters).items()
        ]

    async def set_scales(self, body: list[AdapterScale]) -> dict[str, bool]:
        """Sets which adapters requests have that name none. Those that are not in the body have
        the scale 0, as with llama.cpp."""
        if CALLER.get().adapters is not None:
            raise ApiError(
                400,
                "Scales are for the requests of all keys, and this key is limited to some "
                "adapters. Give `lora` in each request.",
                param="id",
            )
        names = {number: name for name, number in self._requests.numbered(None).items()}
        if unknown := [entry.id for entry in body if entry.id not in names]:
            raise ApiError(404, f"There is no adapter with the id {unknown[0]}.", param="id")
        scales = {names[entry.id]: checked_scale(entry.scale, "scale") for entry in body}
        adapters = self._requests.adapters
        for name, scale in scales.items():
            await self._check_scale(name, adapters[name], scale)
        # Names may have been unloaded meanwhile.
        self._requests.scales = {
            name: scale
            for name, scale in scales.items()
            if scale and name in self._requests.adapters
        }
        return {"success": True}

    @staticmethod
    async def _check_scale(name: str, registered: Registered, scale: float) -> None:
        """Raises RequestError where all requests would fail."""
        try:
            folder = await asyncio.to_thread(lambda: registered.folder)
        except (CheckpointError, OSError) as error:
            raise RequestError(str(error), "id") from error
        if scale not in (0, 1) and not folder.is_additive:
            raise RequestError(f"adapter {name!r} can only have the scale 1.", "scale")

    def _drain(self, known: Registered) -> None:
        """Has workers forget an adapter when no request has it any more."""
        if (digest := known.known_digest) is not None:
            task = asyncio.get_running_loop().create_task(self._forget_drained(digest))
            self._draining.add(task)
            task.add_done_callback(self._draining.discard)

    async def _forget_drained(self, digest: str) -> None:
        while self._requests.usage.has(digest):
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        async with self._lock:
            await self._forget(digest)

    async def _forget(self, digest: str) -> None:
        """Drops an adapter, unless it has another name."""
        others = self._requests.adapters.values()
        if all(other.known_digest != digest for other in others):
            try:
                await self._engine.call_workers("lora.forget", digest, None)
            except ToolkitError:
                # The engine ends, and its memory with it.
                return

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """At the end nothing is drained any more."""
        yield
        for task in self._draining:
            task.cancel()


def add_routes(
    router: APIRouter, engine: ServingEngine, api: OpenAIApi
) -> Callable[[], AbstractAsyncContextManager[object]] | None:
    """Adds the adapters' names, their figures, and the routes of operators, where the engine has
    adapters. Returns the routes' lifespan."""
    requests = engine.processor.parts.by_name.get("lora")
    if not isinstance(requests, LoraRequests):
        return None
    _ = requests.resolvers
    api.engines.aliases.add(AdapterNames(requests))
    if api.metrics is not None:
        figures = LoraFigures(engine, requests)
        api.metrics.registry.register(figures)
        api.metrics.sources.append(figures.ask)
    routes = AdapterRoutes(engine, requests)
    router.add_api_route("/lora-adapters", routes.listed, methods=["GET"])
    if not api.options.admin_routes:
        return None
    for path, handler in (
        ("/v1/load_lora_adapter", routes.load),
        ("/v1/unload_lora_adapter", routes.unload),
    ):
        router.add_api_route(path, handler, methods=["POST"], response_class=PlainTextResponse)
    router.add_api_route("/lora-adapters", routes.set_scales, methods=["POST"])
    router.add_api_route("/load_lora_adapter", routes.sglang_load, methods=["POST"])
    router.add_api_route("/unload_lora_adapter", routes.sglang_unload, methods=["POST"])
    return routes.lifespan
