"""HTTP: pauses, sleeps and new weights, for operators, by vLLM's names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from toolkit_lm_server.errors import ApiError, described

from toolkit_lm_rl.control import AsyncControl
from toolkit_lm_rl.metrics import SleepState
from toolkit_lm_rl.share import PauseMode, Tag
from toolkit_lm_rl.transfer import InitBody, Transfer, UpdateInfo

if TYPE_CHECKING:
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine

    from toolkit_lm_rl import Options


class UpdateBody(BaseModel):
    """Body of /update_weights."""

    model_config = {"extra": "forbid"}
    update_info: UpdateInfo


class FinishBody(BaseModel):
    """Body of /finish_weight_update."""

    model_config = {"extra": "forbid"}
    weight_version: str | None = None


class VersionBody(BaseModel):
    """Body of /update_weight_version."""

    model_config = {"extra": "forbid"}
    new_version: str


class CallBody(BaseModel):
    """Body of /collective_rpc."""

    model_config = {"extra": "forbid"}
    method: Annotated[str, Field(min_length=1, max_length=256)]
    """A method of the class that the option `rl.worker_extension_cls` names."""
    args: Annotated[list[Any], Field(max_length=1024)] = []
    kwargs: Annotated[dict[str, Any], Field(max_length=1024)] = {}
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which the answer is 504. The workers go on."""


class ControlRoutes:
    """Handlers of an engine's control."""

    def __init__(self, engine: ServingEngine, options: Options) -> None:
        self._engine = engine
        self._control = AsyncControl(engine)
        self._folder = options.folder
        self._transfer = Transfer(
            is_on=options.weight_transfer != "off", world_size=self._world_size(include_dp=True)
        )

    async def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> dict[str, str]:
        """Pauses the engine. Requests that come wait for its end."""
        await self._control.pause(mode, clear_cache=clear_cache)
        return {"status": "paused"}

    async def resume(self) -> dict[str, str]:
        """Ends a pause."""
        await self._control.resume()
        return {"status": "resumed"}

    async def is_paused(self) -> dict[str, bool]:
        """Says whether the engine is paused, or sleeps."""
        return {"is_paused": (await self._control.state()).is_paused}

    async def sleep(
        self, level: Annotated[int, Query(ge=0, le=2)] = 1, mode: PauseMode = "abort"
    ) -> dict[str, Any]:
        """Gives memory back: that of the KV cache (1), and of the weights (2)."""
        await self._control.sleep(level, mode)
        return {"status": "sleeping", "level": level}

    async def wake_up(self, tags: Annotated[list[Tag] | None, Query()] = None) -> dict[str, Any]:
        """Brings memory back: all, or that of the tags."""
        is_awake = await self._control.wake_up(tags)
        return {"status": "awake" if is_awake else "sleeping", "tags": tags}

    async def is_sleeping(self) -> dict[str, bool]:
        """Says whether the engine sleeps."""
        return {"is_sleeping": bool((await self._control.state()).asleep)}

    async def start(self) -> dict[str, str]:
        """Begins an update: forgets what an unfinished one has read."""
        await self._control.discard()
        return {"message": "Weight update started"}

    async def init_transfer(self, body: InitBody) -> dict[str, str]:
        """Meets a trainer, which sends its weights over a group of the two."""
        await self._transfer.join(body.init_info)
        return {"message": "Weight transfer initialized"}

    async def update(self, body: UpdateBody) -> dict[str, str]:
        """Reads tensors for the update: from a file, or from the trainer."""
        announced = body.update_info.announced()
        path = body.update_info.path
        if path is not None:
            await self._control.stage(self._contained(path))
        else:
            async with self._transfer.lock:
                await self._control.stage_tensors(self._transfer.tensors(announced))
        return {"message": "Weights updated"}

    async def finish(self, body: FinishBody) -> dict[str, str]:
        """Changes the weights to the tensors that were read."""
        version = await self._control.update(body.weight_version)
        return {"message": "Weight update finished", "weight_version": version}

    async def set_version(self, body: VersionBody) -> dict[str, Any]:
        """Gives the present weights another name."""
        await self._control.set_version(body.new_version)
        return {"success": True, "new_version": body.new_version}

    async def collective_rpc(self, body: CallBody) -> dict[str, list[Any]]:
        """Calls a method of the workers' extension, and tells what each answers."""
        call = self._control.collective_rpc(body.method, body.args, body.kwargs)
        try:
            results = await asyncio.wait_for(call, body.timeout)
        except TimeoutError:
            raise ApiError(
                504, f"{body.method} takes longer than timeout.", code="timeout"
            ) from None
        try:
            return {"results": msgspec.json.decode(msgspec.json.encode(results))}
        except (TypeError, ValueError) as error:
            text = f"the answer of {body.method} is no JSON: {error}."
            raise ApiError(400, text, param="method") from error

    async def weight_info(self) -> dict[str, str]:
        """Tells the version of the weights."""
        return {"weight_version": (await self._control.state()).weight_version}

    async def world_size(self, include_dp: bool = True) -> dict[str, int]:
        """Tells the number of ranks."""
        return {"world_size": self._world_size(include_dp=include_dp)}

    def _world_size(self, *, include_dp: bool) -> int:
        parallel = self._engine.config.parallel
        size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return size * (parallel.data_parallel_size if include_dp else 1)

    def _contained(self, path: str) -> str:
        """The path, which must be in the folder of the options. Raises ApiError."""
        if self._folder is None:
            raise ApiError(
                400,
                "Weights are read out of the folder that the option rl.folder names, and it names "
                "none.",
                param="path",
            )
        root = Path(self._folder).resolve()
        found = (root / path.replace("\0", "")).resolve()
        if not found.is_relative_to(root):
            raise ApiError(400, f"path: {path!r} is not in the folder of weights.", param="path")
        return str(found)


def add_routes(router: APIRouter, engine: ServingEngine, options: Options, api: OpenAIApi) -> None:
    """Adds the state of sleep to the server's figures, and the routes of operators where the
    server has any."""
    if api.metrics is not None:
        state = SleepState(engine)
        api.metrics.registry.register(state)
        api.metrics.sources.append(state.ask)
    if not api.options.admin_routes:
        return
    routes = ControlRoutes(engine, options)
    for path, handler in (
        ("/pause", routes.pause),
        ("/resume", routes.resume),
        ("/sleep", routes.sleep),
        ("/wake_up", routes.wake_up),
        ("/start_weight_update", routes.start),
        ("/finish_weight_update", routes.finish),
        ("/update_weight_version", routes.set_version),
    ):
        router.add_api_route(path, handler, methods=["POST"])
    router.add_api_route(
        "/collective_rpc", routes.collective_rpc, methods=["POST"], responses=described(504)
    )
    for path, waiting in (
        ("/init_weight_transfer_engine", routes.init_transfer),
        ("/update_weights", routes.update),
    ):
        router.add_api_route(path, waiting, methods=["POST"], responses=described(504))
    for path, getter in (
        ("/is_paused", routes.is_paused),
        ("/is_sleeping", routes.is_sleeping),
        ("/weight_info", routes.weight_info),
        ("/get_world_size", routes.world_size),
    ):
        router.add_api_route(path, getter)
