"""Routes of the Open Inference Protocol, KServe's second, over pooling models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from fastapi import APIRouter, Path, Request, Response
from starlette.convertors import Convertor, register_url_convertor
from toolkit_lm import __version__
from toolkit_lm.errors import RequestError
from toolkit_lm_server.answer_schemas import answers
from toolkit_lm_server.answers import encoded
from toolkit_lm_server.errors import as_api_error, described, renamed
from toolkit_lm_server.plugin_routes import OpenAIApi
from toolkit_lm_server.pooled import pool
from toolkit_lm_server.threads import aside

from toolkit_lm_vendor_apis.kserve import schemas
from toolkit_lm_vendor_apis.kserve.body import IDS, MASK, OUTPUTS, TASKS, InferBody, Task
from toolkit_lm_vendor_apis.kserve.errors import KserveError, refusal
from toolkit_lm_vendor_apis.route_kinds import route_kind

if TYPE_CHECKING:
    from toolkit_lm.outputs import PoolingRequestOutput
    from toolkit_lm_serving.engine import ServingEngine


class _ModelName(Convertor[str]):
    """A name, which may have slashes, in a path that ends with it. Paths of a model's other routes
    are none of its own, so that their errors list their own methods."""

    regex = r"(?!.*/(?:infer|ready)$).+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("model_name", _ModelName())
Name = Annotated[str, Path(description="The model's name, as /v1/models lists it.")]
_FIELDS = {"truncate_prompt_tokens": "parameters.truncate"}


class Kserve:
    """Tensors of pooling models, as the Open Inference Protocol has them."""

    def __init__(self, api: OpenAIApi) -> None:
        self._api = api

    async def server(self) -> dict[str, Any]:
        """Describes the server."""
        return {"name": "toolkit-lm", "version": __version__, "extensions": []}

    async def live(self) -> dict[str, Any]:
        """The server answers."""
        return {"live": True}

    async def ready(self) -> dict[str, Any]:
        """Requests are served; else the answer is 503."""
        return {"live": True, "ready": True}

    async def model_ready(self, name: Name) -> dict[str, Any]:
        """A model answers requests; else the answer is 503."""
        self._engine(name)
        return {"name": name, "ready": True}

    async def model(self, name: Name) -> dict[str, Any]:
        """Describes a model's tensors."""
        engine = self._engine(name)
        served = [task for task in TASKS if task in engine.tasks]
        inputs = [
            {"name": "text", "datatype": "BYTES", "shape": [-1]},
            *({"name": each, "datatype": "INT64", "shape": [-1, -1]} for each in (IDS, MASK)),
        ]
        outputs = [
            {"name": OUTPUTS[task], "datatype": "FP32", "shape": [-1, _width(engine, task)]}
            for task in served
        ]
        return {
            "name": name,
            "platform": "toolkit-lm",
            "inputs": inputs if served else [],
            "outputs": outputs,
        }

    async def infer(self, name: Name, body: InferBody, request: Request) -> Response:
        """Embeds or classifies each input."""
        engine = self._engine(name)
        if body.model is not None and self._api.engines[body.model] is not engine:
            raise RequestError("model must be the one that the path names.", "model")
        task = body.task(engine.tasks)
        prompts = await aside(body.prompts, self._api.options.max_inputs)
        truncate = body.parameters is not None and body.parameters.truncate
        try:
            outputs = await pool(
                engine,
                body,
                request,
                prompts,
                body.params(task),
                names=[f"inputs[{index}]" for index in range(len(prompts))],
                fields=_FIELDS,
                truncate_prompt_tokens=engine.config.max_model_len if truncate else None,
            )
        except RequestError as error:
            raise renamed(as_api_error(error), {"input": "inputs"}) from error

        def made() -> bytes:
            rows = np.stack([_row(output) for output in outputs])
            tensor = {
                "name": OUTPUTS[task],
                "shape": list(rows.shape),
                "datatype": "FP32",
                "data": rows.astype(np.float32, copy=False).ravel().tolist(),
            }
            own_id = {} if body.id is None else {"id": body.id}
            return bytes(encoded({"model_name": name, **own_id, "outputs": [tensor]}))

        return Response(await asyncio.to_thread(made), media_type="application/json")

    def _engine(self, name: str) -> ServingEngine:
        """A model's engine. Raises ApiError (404)."""
        return self._api.engines[name]


def _row(output: PoolingRequestOutput) -> np.ndarray:
    """The numbers of an input's result."""
    assert output.outputs.data is not None, "`pool` gives results with data"
    return np.atleast_1d(output.outputs.data)


def _width(engine: ServingEngine, task: Task) -> int:
    """Numbers of an input's result; -1: that is known once it is computed."""
    labels = engine.config.hf_config.get("id2label")
    return len(labels) if task == "classify" and labels else -1


def add_routes(router: APIRouter, api: OpenAIApi) -> None:
    """Adds the routes. A model's name may have slashes."""
    kserve = Kserve(api)
    kind = route_kind(router, KserveError, refusal)
    of_model = "/v2/models/{name:path}"
    missing = described(404, kind=KserveError)
    gets: list[tuple[str, Callable[..., Any], type]] = [
        ("/v2", kserve.server, schemas.KserveServer),
        ("/v2/health/live", kserve.live, schemas.KserveLive),
        ("/v2/health/ready", kserve.ready, schemas.KserveReady),
        (f"{of_model}/ready", kserve.model_ready, schemas.KserveModelReady),
        ("/v2/models/{name:model_name}", kserve.model, schemas.KserveModel),
    ]
    for path, handler, made in gets:
        router.add_api_route(
            path,
            handler,
            response_model=None,
            responses=answers(made) | (missing if path.startswith("/v2/models") else {}),
            route_class_override=kind,
        )
    router.add_api_route(
        f"{of_model}/infer",
        kserve.infer,
        methods=["POST"],
        response_model=None,
        responses=answers(schemas.KserveAnswer) | described(404, 429, 504, kind=KserveError),
        route_class_override=kind,
    )
