"""The routes, as a router for any FastAPI app and as an app of their own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match
from toolkit_lm import __version__
from toolkit_lm.plugin import LogitsProcessorRegistry
from toolkit_lm_serving.budget import BudgetedLLM, CostBudget, Shares

from toolkit_lm_server.answer_schemas import (
    NOT_NOW,
    AnyAnswer,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ModelCard,
    ModelList,
    ServerLoad,
    Status,
    Text,
    TokenIds,
    TokenizerInfo,
    answers,
    streams,
)
from toolkit_lm_server.chat import Chat
from toolkit_lm_server.chat_batch import ChatBatchBody
from toolkit_lm_server.completions import CompletionBody, Completions
from toolkit_lm_server.embeddings import Embeddings
from toolkit_lm_server.engines import ByModel, Engines, by_engine
from toolkit_lm_server.errors import as_api_error, described
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.infill import Filling, Infill, InfillBody
from toolkit_lm_server.invocations import Invocations
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.other_paths import OtherPaths
from toolkit_lm_server.plugin_routes import OpenAIApi, add_plugin_routes
from toolkit_lm_server.pooled_schemas import (
    Classifications,
    CohereEmbeddings,
    EmbeddingList,
    OldCohereEmbeddings,
    PooledList,
    Ranking,
    Scores,
)
from toolkit_lm_server.protocol import ChatBody, body_of
from toolkit_lm_server.reranking import Reranking
from toolkit_lm_server.responses.body import ResponsesBody
from toolkit_lm_server.responses.routes import add_responses
from toolkit_lm_server.route import ServerRoute, route_class, vllm_route, with_body
from toolkit_lm_server.stored_chats import StoringChatBody, add_stored_chats
from toolkit_lm_server.tokens import Tokens
from toolkit_lm_server.ui.files import add_api_page

if TYPE_CHECKING:
    from toolkit_lm import AsyncLLM
    from toolkit_lm_serving.engine import ServingEngine

    from toolkit_lm_server.ui.page import Page


_PERMISSION = {
    "object": "model_permission",
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}
"""The permission of a model, as OpenAI's older clients read it."""
_OF_VLLM = ("/pooling", "/classify", "/score", "/v1/score")


class About:
    """Handlers that tell of the server itself."""

    def __init__(self, readiness: Readiness, metrics: Metrics | None) -> None:
        self._readiness = readiness
        self._metrics = metrics

    async def version(self) -> dict[str, str]:
        """The version of toolkit-lm."""
        return {"version": __version__}

    async def metrics(self) -> Response:
        """Figures for Prometheus."""
        assert self._metrics is not None
        await self._metrics.ask()
        self._metrics.observe(self._readiness.engine)
        return PlainTextResponse(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)


class Operations:
    """Handlers that change engines, for operators."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    async def reset_prefix_cache(self) -> dict[str, str]:
        """Empties the prefix cache. Requests under way go on."""
        for engine in {id(engine): engine for engine in self._engines.values()}.values():
            await engine.reset_prefix_cache()
        return {"status": "reset"}


class Load:
    """Tells how much work is under way."""

    def __init__(self, budget: CostBudget) -> None:
        self._budget = budget

    async def load(self) -> dict[str, int]:
        """Counts the prompts and inputs of requests that are under way or wait."""
        return {"server_load": self._budget.num_requests}


class Served:
    """Handlers that list the served models."""

    def __init__(self, models: ByModel[Any]) -> None:
        self._models = models
        self._aliases = models.aliases
        self._created = int(time.time())
        self._permission = _PERMISSION | {
            "id": f"modelperm-{uuid.uuid4().hex}",
            "created": self._created,
        }

    async def models(self) -> dict[str, Any]:
        """The models that are served."""
        return {
            "object": "list",
            "data": [self._card(name) for name in (*self._models, *self._aliases.names()) if name],
        }

    async def model(self, model: str) -> dict[str, Any]:
        """Describes one model."""
        return self._card(model) if model else await self.models()

    def _card(self, name: str) -> dict[str, Any]:
        model = self._models[name]
        config = model.config
        alias = None if name in self._models else self._aliases.find(name)
        if alias is not None and alias.root is None:
            raise self._models.unknown(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "toolkit-lm",
            "root": config.model.model if alias is None else alias.root,
            "parent": None if alias is None else self._models[None].served_model_name,
            "max_model_len": config.max_model_len,
            "vocab_size": config.vocab_size,
            "sampling_defaults": config.sampling_defaults,
            "permission": [self._permission],
        }


def create_router(
    engine: AsyncLLM,
    options: ServerOptions | None = None,
    *,
    metrics: Metrics | None = None,
    readiness: Readiness | None = None,
    page: Page | None = None,
    keys: Keys | None = None,
    memory: Shares | None = None,
) -> APIRouter:
    """The server's routes, to be included in any FastAPI app. The caller owns the engine. Only
    plugins' routes may need the app's lifespan.

    `metrics` adds /metrics, `page` adds /. `readiness` is for a caller that refuses requests before
    it ends. `keys`: those of the options, for a caller that replaces them. `memory`: the memory of
    all requests, where several engines share it. Raises ConfigError for an unknown name in
    `options.routes`, PluginError when a plugin's routes or logits processors fail.
    """
    options = options or ServerOptions()
    readiness = readiness or Readiness(engine)
    keys = keys or Keys.of(options)
    budget = CostBudget(options.max_request_bytes, engine.config.limits.max_queued_requests, memory)
    accounts = None if keys is None else keys.accounts
    asked = None if metrics is None else metrics.asked
    serving: ServingEngine = BudgetedLLM(engine, budget, accounts, asked)
    engines = by_engine(serving)
    route_kind = route_class(options, keys, readiness, metrics)
    router = APIRouter(route_class=route_kind)
    tokens = Tokens(engines)
    with_fields = (
        serving.plugins.logits_processors,
        serving.config.sampling_defaults,
        options.force_include_usage,
    )
    chat_body = StoringChatBody if options.max_stored_responses else ChatBody
    chat = Chat(engines, body_of(chat_body, *with_fields), options)
    completions = Completions(engines, options, body_of(CompletionBody, *with_fields))
    _add_generation_routes(router, engines, chat, completions, with_fields)
    responses = add_responses(router, engines, chat, body_of(ResponsesBody, *with_fields), options)
    embeddings = Embeddings(engines, options)
    reranking = Reranking(engines, options)
    _add_pooling_routes(router, route_kind, embeddings, reranking)
    _add_invocations(router, Invocations(engines, chat, completions, embeddings, reranking))
    router.add_api_route(
        "/load", Load(budget).load, response_model=None, responses=answers(ServerLoad)
    )
    _add_models(router, Served(engines))
    _add_token_routes(router, vllm_route(route_kind), tokens, with_info=options.tokenizer_info)
    if options.admin_routes:
        router.add_api_route(
            "/reset_prefix_cache", Operations(engines).reset_prefix_cache, methods=["POST"]
        )
    add_own_routes(router, options, keys, readiness, metrics)
    if page is not None:
        page.add_routes(router, route_class(options, keys), readiness, serving)
    api = OpenAIApi(
        engines, chat, completions, responses, options, router, metrics, lambda: budget.num_requests
    )
    add_plugin_routes(router, api, route_kind)
    return router


def _add_models(router: APIRouter, served: Served) -> None:
    router.add_api_route(
        "/v1/models", served.models, response_model=None, responses=answers(ModelList)
    )
    router.add_api_route(
        "/v1/models/{model:path}",
        served.model,
        response_model=None,
        responses=answers(ModelCard) | described(404),
    )


def _add_invocations(router: APIRouter, invocations: Invocations) -> None:
    router.add_api_route(
        "/invocations",
        with_body(invocations.create, dict[str, Any]),
        methods=["POST"],
        response_model=None,
        responses=answers(AnyAnswer) | described(404, 429, 504),
    )


def _add_generation_routes(
    router: APIRouter,
    engines: Engines,
    chat: Chat,
    completions: Completions,
    with_fields: tuple[LogitsProcessorRegistry, dict[str, Any], bool],
) -> None:
    """Adds the routes that generate. `with_fields`: the arguments of `body_of` that come from the
    engine."""
    for path, handler, whole, success in (
        (
            "/v1/chat/completions",
            chat.create,
            chat.body,
            streams(ChatCompletion, ChatCompletionChunk),
        ),
        (
            "/v1/chat/completions/batch",
            chat.create,
            body_of(ChatBatchBody, *with_fields),
            answers(ChatCompletion),
        ),
        ("/v1/completions", completions.create, completions.body, streams(Completion, Completion)),
        (
            "/infill",
            Infill(engines, completions).create,
            body_of(InfillBody, *with_fields),
            streams(Filling, Filling),
        ),
    ):
        responses = success | described(404, 429, 504)
        router.add_api_route(
            path,
            with_body(handler, whole),
            methods=["POST"],
            response_model=None,
            responses=responses,
        )
    if chat.store.is_on:
        add_stored_chats(router, chat.store)


def _add_token_routes(
    router: APIRouter, kind_of_route: type[ServerRoute], tokens: Tokens, *, with_info: bool
) -> None:
    for path, convert, kind in (
        ("/tokenize", tokens.tokenize, TokenIds),
        ("/detokenize", tokens.detokenize, Text),
    ):
        responses = answers(kind) | described(404)
        router.add_api_route(
            path,
            convert,
            methods=["POST"],
            response_model=None,
            responses=responses,
            route_class_override=kind_of_route,
        )
    if with_info:
        router.add_api_route(
            "/tokenizer_info", tokens.info, response_model=None, responses=answers(TokenizerInfo)
        )


def add_own_routes(
    router: APIRouter,
    options: ServerOptions,
    keys: Keys | None,
    readiness: Readiness,
    metrics: Metrics | None,
) -> None:
    """Adds the routes that need no engine."""
    about = About(readiness, metrics)
    always = route_class(options, keys)
    router.add_api_route("/version", about.version, route_class_override=always)
    if metrics is not None:
        router.add_api_route(
            "/metrics",
            about.metrics,
            response_model=None,
            response_class=PlainTextResponse,
            route_class_override=always,
        )
    # These are open to all, so they are no ServerRoutes.
    for method, path, handler in (
        ("GET", "/live", readiness.live),
        ("GET", "/health", readiness.health),
        ("GET", "/ready", readiness.health),
        ("GET", "/ping", readiness.health),
        ("POST", "/ping", readiness.health),
    ):
        responses = answers(Status) | NOT_NOW
        router.add_api_route(
            path,
            handler,
            methods=[method],
            response_model=None,
            route_class_override=APIRoute,
            responses=responses,
        )


def _add_pooling_routes(
    router: APIRouter, route_kind: type[ServerRoute], embeddings: Embeddings, reranking: Reranking
) -> None:
    """Adds the routes of pooling models, whatever the model. A task that it does not serve is an
    error that lists those it does."""
    handlers: dict[str, tuple[Callable[..., Any], type[BaseModel]]] = {
        "/v1/embeddings": (embeddings.embed, EmbeddingList),
        "/v1/embed": (embeddings.old_cohere_embed, OldCohereEmbeddings),
        "/v2/embed": (embeddings.cohere_embed, CohereEmbeddings),
        "/pooling": (embeddings.pooling, PooledList),
        "/classify": (embeddings.classify, Classifications),
        "/score": (reranking.score, Scores),
        "/v1/score": (reranking.score, Scores),
        "/rerank": (reranking.rerank, Ranking),
        "/v1/rerank": (reranking.rerank, Ranking),
        "/v2/rerank": (reranking.cohere_rerank, Ranking),
    }
    for path, (handler, kind) in handlers.items():
        responses = answers(kind) | described(404, 429, 504)
        route = vllm_route(route_kind) if path in _OF_VLLM else route_kind
        router.add_api_route(
            path,
            handler,
            methods=["POST"],
            response_model=None,
            responses=responses,
            route_class_override=route,
        )


def create_app(
    engine: AsyncLLM,
    options: ServerOptions | None = None,
    *,
    metrics: Metrics | None = None,
    readiness: Readiness | None = None,
    page: Page | None = None,
    keys: Keys | None = None,
    memory: Shares | None = None,
) -> FastAPI:
    """An app with the server's routes. The caller owns the engine. Arguments and errors are those
    of `create_router`."""
    options = options or ServerOptions()
    app = make_app(options)
    router = create_router(
        engine,
        options,
        metrics=metrics,
        readiness=readiness,
        page=page,
        keys=keys,
        memory=memory,
    )
    app.state.api = router.routes
    serve_routes(app, router)
    app.router.default = OtherPaths(app)
    return app


def create_early_app(
    options: ServerOptions,
    metrics: Metrics,
    readiness: Readiness,
    page: Page | None = None,
    keys: Keys | None = None,
) -> FastAPI:
    """An app for the time in which the engine is made and `readiness` refuses requests. It answers
    as `create_app`'s would."""
    app = make_app(options)
    keys = keys or Keys.of(options)
    router = APIRouter(route_class=route_class(options, keys, readiness, metrics))
    add_own_routes(router, options, keys, readiness, metrics)
    if page is not None:
        page.add_routes(router, route_class(options, keys), readiness, None)
    app.state.early = [*app.routes, *router.routes]
    # Which others there will be depends on the engine.
    router.add_api_route(
        "/{path:path}",
        _refused,
        methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"],
    )
    serve_routes(app, router)
    return app


async def _refused() -> None:
    raise AssertionError("the route's class refuses all requests while there is no engine")


def serve_routes(app: FastAPI, router: APIRouter) -> None:
    """Gives an app the routes and the lifespan of a router. `include_router` would make each route
    a second time, while the first request waits."""
    app.router.routes.extend(router.routes)
    app.router.lifespan_context = router.lifespan_context


def make_app(options: ServerOptions) -> FastAPI:
    """An app without routes."""
    # The generated pages describe the API to anyone, so they are on only where anyone may use it.
    openapi_url = None if options.needs_key else "/openapi.json"
    app = FastAPI(
        title="toolkit-lm",
        version=__version__,
        openapi_url=openapi_url,
        docs_url=None,
        redoc_url=None,
        exception_handlers={HTTPException: _answer_error},
        # A redirect would send clients, with their keys, to whatever the Host header names.
        redirect_slashes=False,
    )
    app.state.api = []
    if openapi_url is not None:
        add_api_page(app)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    api_error = as_api_error(error)
    if api_error.status == 405:
        # One path may have several routes.
        matching = [
            route
            for route in request.app.state.api
            if route.matches(request.scope)[0] is not Match.NONE
        ]
        methods = {method for route in matching for method in getattr(route, "methods", ())}
        api_error.headers = {"Allow": ", ".join(sorted(methods))} if methods else api_error.headers
    return api_error.response()
