"""SGLang's routes, as far as they are about using a model."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any, cast

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from toolkit_lm import __version__
from toolkit_lm_server.answer_schemas import answers, streams
from toolkit_lm_server.answers import encoded
from toolkit_lm_server.errors import as_api_error, described, renamed, validated
from toolkit_lm_server.event_stream import stream_of
from toolkit_lm_server.plugin_routes import OpenAIApi
from toolkit_lm_server.route import ServerRoute, request_context, vllm_route
from toolkit_lm_server.threads import aside

from toolkit_lm_vendor_apis.sglang.body import NAMES, SglangGenerateBody
from toolkit_lm_vendor_apis.sglang.encoding import Encoding
from toolkit_lm_vendor_apis.sglang.output import Answers
from toolkit_lm_vendor_apis.sglang.schemas import (
    SglangAnswer,
    SglangAnswers,
    SglangClasses,
    SglangEncodings,
    SglangModel,
    SglangServer,
)


class Sglang:
    """Completions and the model's properties, as SGLang has them."""

    def __init__(self, api: OpenAIApi) -> None:
        self._api = api

    async def generate(self, body: SglangGenerateBody, request: Request) -> Response:
        """Completes one or several prompts."""
        begin = self._begin(body, request_context(request))
        if body.stream:
            return await stream_of(begin, Answers.events)
        found = await begin
        choices = await found.generation.choices()

        def made() -> bytes:
            whole = [*map(found.whole, choices)]
            return bytes(encoded(whole if found.is_several else whole[0]))

        return Response(await asyncio.to_thread(made), media_type="application/json")

    async def _begin(self, body: SglangGenerateBody, context: dict[str, str]) -> Answers:
        completions = self._api.completions
        start = time.perf_counter()
        try:
            completion = await aside(lambda: validated(completions.body, body.completion()))
            generation = await completions.begin(completion, context)
            return Answers(body, generation, completion.params().n, start)
        except Exception as error:
            prompt = "text" if body.input_ids is None else "input_ids"
            raise renamed(as_api_error(error), {**NAMES, "prompt": prompt}) from error

    async def model_info(self) -> dict[str, Any]:
        """Properties of the model."""
        engine = self._api.engines[None]
        config = engine.config
        rules = engine.renderer.rules
        modalities = () if rules is None else rules.modalities
        return {
            "model_path": config.model.model,
            "tokenizer_path": config.renderer.tokenizer or config.model.model,
            "is_generation": "generate" in engine.tasks,
            "preferred_sampling_params": config.sampling_defaults or None,
            "has_image_understanding": "image" in modalities,
            "has_audio_understanding": "audio" in modalities,
            "model_type": str(config.hf_config.get("model_type", "")),
            "architectures": list(config.hf_config.get("architectures") or ()),
        }

    async def server_info(self) -> dict[str, Any]:
        """The server's limits, without its other options."""
        engine = self._api.engines[None]
        config = engine.config
        return {
            "model_path": config.model.model,
            "tokenizer_path": config.renderer.tokenizer or config.model.model,
            "served_model_name": engine.served_model_name,
            "context_length": config.max_model_len,
            "dtype": config.model.dtype,
            "tp_size": config.parallel.tensor_parallel_size,
            "dp_size": config.parallel.data_parallel_size,
            "max_running_requests": config.scheduler.max_num_seqs,
            "is_embedding": "generate" not in engine.tasks,
            "version": __version__,
        }

    async def health_generate(self, request: Request) -> Response:
        """Draws a token: 200 where the engine answers."""
        if "generate" in self._api.engines[None].tasks:
            fields = {"prompt": [0], "max_tokens": 1, "temperature": 0}
            async with aclosing(
                await self._api.completions.ask(fields, request_context(request))
            ) as generation:
                await generation.choices()
        return PlainTextResponse("")

    async def flush_cache(self) -> Response:
        """Empties the prefix cache. Requests under way go on."""
        for engine in {id(engine): engine for engine in self._api.engines.values()}.values():
            await engine.reset_prefix_cache()
        return PlainTextResponse("Cache flushed.\n")


def add_routes(router: APIRouter, api: OpenAIApi) -> None:
    """Adds the routes."""
    sglang = Sglang(api)
    router.add_api_route(
        "/generate",
        sglang.generate,
        methods=["POST"],
        response_model=None,
        responses=streams(SglangAnswers, SglangAnswer) | described(404, 429, 504),
    )
    encoding = Encoding(api)
    router.add_api_route(
        "/encode",
        encoding.encode,
        methods=["POST"],
        response_model=None,
        responses=answers(SglangEncodings) | described(404, 429, 504),
    )
    kind = vllm_route(cast("type[ServerRoute]", router.route_class))
    router.add_api_route(
        "/classify",
        encoding.classify,
        methods=["POST"],
        response_model=None,
        responses=answers(SglangClasses) | described(404, 429, 504),
        route_class_override=type("SharedRoute", (kind,), {"replaces": True}),
    )
    router.add_api_route(
        "/get_server_info",
        sglang.server_info,
        response_model=None,
        responses=answers(SglangServer),
    )
    for path in ("/get_model_info", "/model_info"):
        router.add_api_route(
            path, sglang.model_info, response_model=None, responses=answers(SglangModel)
        )
    router.add_api_route(
        "/health_generate",
        sglang.health_generate,
        response_class=PlainTextResponse,
        responses=described(429, 504),
    )
    if api.options.admin_routes:
        router.add_api_route(
            "/flush_cache", sglang.flush_cache, methods=["POST"], response_class=PlainTextResponse
        )
