"""Ollama's routes, as far as they are about using models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm_server.answer_schemas import answers
from toolkit_lm_server.answers import answer
from toolkit_lm_server.errors import ApiError, as_api_error, described, renamed
from toolkit_lm_server.event_stream import JsonLines
from toolkit_lm_server.plugin_routes import OpenAIApi
from toolkit_lm_server.pooled import pool, usage
from toolkit_lm_server.pooling_protocol import read_texts
from toolkit_lm_server.route import request_context

from toolkit_lm_vendor_apis.ollama import schemas
from toolkit_lm_vendor_apis.ollama.body import (
    NAMES,
    EmbedBody,
    GenerateBody,
    NamedModel,
    OldEmbedBody,
    OllamaChatBody,
    ShowBody,
)
from toolkit_lm_vendor_apis.ollama.models import Models
from toolkit_lm_vendor_apis.ollama.output import (
    ChatAnswerParts,
    Clock,
    CompletionParts,
    Output,
    now,
)
from toolkit_lm_vendor_apis.route_kinds import route_kind

if TYPE_CHECKING:
    from toolkit_lm.outputs import PoolingRequestOutput
    from toolkit_lm_serving.engine import ServingEngine


class Ollama:
    """Chats, texts and vectors, as Ollama has them."""

    def __init__(self, api: OpenAIApi, models: Models) -> None:
        self._api = api
        self._models = models

    async def chat(self, body: OllamaChatBody, request: Request) -> Response:
        """Answers a conversation."""
        if not body.messages:
            return self._loaded(body, {"message": {"role": "assistant", "content": ""}})
        return await self._chat(body, body.chat, request)

    async def generate(self, body: GenerateBody, request: Request) -> Response:
        """Answers a prompt, through the chat template where the model has one."""
        if not body.prompt:
            return self._loaded(body, {"response": ""})
        if not (body.raw or body.suffix) and self._models.template:
            return await self._chat(body, body.chat, request)
        clock = Clock()
        try:
            reply = await self._api.completions.ask(
                body.completion(self._api.engines[body.name].config.max_model_len),
                request_context(request),
            )
        except Exception as error:
            raise renamed(as_api_error(error), NAMES) from error
        clock.first()
        output = Output(self._named(body), CompletionParts(reply), clock, is_chat=False)
        return await _sent(output, reply, stream=body.stream)

    async def _chat(
        self,
        body: OllamaChatBody | GenerateBody,
        fields: Callable[[], dict[str, Any]],
        request: Request,
    ) -> Response:
        clock = Clock()
        try:
            reply = await self._api.chat.ask(fields(), request_context(request), NAMES)
        except Exception as error:
            raise renamed(as_api_error(error), NAMES) from error
        clock.first()
        parts = ChatAnswerParts(reply, thinks=body.think is not False)
        return await _sent(
            Output(self._named(body), parts, clock, is_chat=isinstance(body, OllamaChatBody)),
            reply,
            stream=body.stream,
        )

    async def embed(self, body: EmbedBody, request: Request) -> Response:
        """One vector of each text."""
        clock = Clock()
        outputs = await self._pool(
            body, request, body.input, "input", body.truncate, body.dimensions
        )
        figures = clock.figures(
            {"prompt_tokens": usage(outputs)["prompt_tokens"], "completion_tokens": 0}
        )
        responses = {
            name: figures[name] for name in ("total_duration", "load_duration", "prompt_eval_count")
        }
        model = self._named(body)
        return await answer(
            lambda: {
                "model": model,
                "embeddings": (_vector(output) for output in outputs),
                **responses,
            }
        )

    async def old_embed(self, body: OldEmbedBody, request: Request) -> Response:
        """The vector of one text."""
        [output] = await self._pool(body, request, body.prompt, "prompt", True, None)
        return await answer(lambda: {"embedding": _vector(output)})

    async def show(self, body: ShowBody) -> dict[str, Any]:
        """Description of the model and its abilities."""
        self._api.engines[body.name]
        return self._models.card()

    async def _pool(
        self,
        body: NamedModel,
        request: Request,
        given_texts: Any,
        field: str,
        cut: bool,
        dimensions: int | None,
    ) -> list[PoolingRequestOutput]:
        engine = self._api.engines[body.name]
        texts = read_texts(given_texts, field, self._api.options.max_inputs)
        names = (
            [field]
            if isinstance(given_texts, str)
            else [f"{field}[{index}]" for index in range(len(texts))]
        )
        params = PoolingParams(task="embed", dimensions=dimensions)
        longest = engine.config.max_model_len if cut else None
        return await pool(
            engine, body, request, texts, params, names=names, truncate_prompt_tokens=longest
        )

    def _loaded(self, body: NamedModel, nothing: dict[str, Any]) -> Response:
        self._api.engines[body.name]
        return JSONResponse(
            {
                "model": self._named(body),
                "created_at": now(),
                **nothing,
                "done": True,
                "done_reason": "load",
            }
        )

    def _named(self, body: NamedModel) -> str:
        """The model, as the client named it."""
        return body.model or self._api.engines[None].served_model_name


async def _sent(output: Output, source: Any, *, stream: bool) -> Response:
    if stream:
        return JsonLines(output.lines(), source)
    async with aclosing(source):
        await output.read()
    return await answer(output.whole, is_large=output.is_large)


def _vector(output: PoolingRequestOutput) -> list[float]:
    assert output.outputs.data is not None, "`pool` gives results with data"
    vector: list[float] = output.outputs.data.tolist()
    return vector


def add_routes(router: APIRouter, engine: ServingEngine, api: OpenAIApi) -> None:
    """Adds the routes."""
    kind = route_kind(router, schemas.OllamaError, _refusal, takes_any_type=True)
    models = Models(engine)
    ollama = Ollama(api, models)
    lines: dict[str, Any] = {"application/x-ndjson": {}}
    limits = described(404, 429, 504, kind=schemas.OllamaError)
    posts: list[tuple[str, Callable[..., Any], type, dict[str, Any]]] = [
        ("/api/chat", ollama.chat, schemas.OllamaChat, lines),
        ("/api/generate", ollama.generate, schemas.OllamaText, lines),
        ("/api/embed", ollama.embed, schemas.OllamaVectors, {}),
        ("/api/embeddings", ollama.old_embed, schemas.OllamaVector, {}),
        ("/api/show", ollama.show, schemas.OllamaCard, {}),
    ]
    for path, handler, made, content in posts:
        responses: dict[int | str, dict[str, Any]] = {200: {"model": made, "content": content}}
        router.add_api_route(
            path,
            handler,
            methods=["POST"],
            response_model=None,
            responses=responses | limits,
            route_class_override=kind,
        )
    gets: list[tuple[str, Callable[..., Any], type]] = [
        ("/api/tags", models.tags, schemas.OllamaModels),
        ("/api/ps", models.running, schemas.RunningModels),
        ("/api/version", models.version, schemas.OllamaVersion),
    ]
    for path, handler, made in gets:
        router.add_api_route(
            path, handler, response_model=None, responses=answers(made), route_class_override=kind
        )


def _refusal(error: ApiError) -> Response:
    return JSONResponse({"error": error.body["error"]["message"]}, error.status, error.headers)
