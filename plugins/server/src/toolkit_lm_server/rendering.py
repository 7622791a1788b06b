"""The server of `toolkit render`: a model's renderer over HTTP, with neither an engine nor
torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request, Response
from msgspec import structs
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ContextLengthError, RequestError, UnsupportedError
from toolkit_lm.frontend import Health
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import Plugins
from toolkit_lm.processing import (
    check_bounds,
    check_placeholders,
    check_token_ids,
    cut_features,
    cut_prompt,
)
from toolkit_lm.renderer import Rendered, Renderer, make_renderer
from toolkit_lm.resolution import resolve_configured
from toolkit_lm_serving.budget import BudgetedModel, CostBudget

from toolkit_lm_server.answer_schemas import (
    ModelCard,
    ModelList,
    Text,
    TokenIds,
    answers,
)
from toolkit_lm_server.answers import accepted, answer
from toolkit_lm_server.app import Served, add_own_routes, make_app, serve_routes
from toolkit_lm_server.engines import Models, by_model
from toolkit_lm_server.errors import ApiError, described
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.held import HeldElsewhere
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.protocol import body_of
from toolkit_lm_server.render_protocol import (
    ChatRenderBody,
    CompletionRenderBody,
    DerenderBody,
    Held,
)
from toolkit_lm_server.rendered_schemas import (
    Derendered,
    RenderedList,
    RenderedPrompt,
)
from toolkit_lm_server.route import request_context, route_class, with_body
from toolkit_lm_server.tokens import Tokens

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServedModel

_UNSAID = SamplingParams()


class Rendering:
    """Stands in for an engine on a server of a renderer. It is a Model (toolkit_lm_serving)."""

    num_restarts = 0
    num_queued_tokens = 0
    error: BaseException | None = None

    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        """Reads the checkpoint's config and tokenizer, and no weights. Raises ToolkitError."""
        self.plugins = plugins
        self.config = resolve_configured(plugins.configure(config), plugins)
        assert self.config.checkpoint is not None
        if plugins.models.load_rules(self.config.checkpoint.architecture) is not None:
            raise UnsupportedError(
                "toolkit render cannot render for an encoder-decoder model: its prompts go to "
                "toolkit serve."
            )
        self.renderer: Renderer = make_renderer(self.config, plugins)
        self.held = HeldElsewhere()
        self.renderer.feature_cache = self.held
        self.vocab_size = self.config.vocab_size or self.renderer.vocab_size
        self.served_model_name = self.config.served_model_name

    def health(self) -> Health:
        return Health("ready")

    async def wait_ready(self) -> None:
        """Returns at once: the renderer is ready once it is made."""

    def close(self) -> None:
        """Has no effect: nothing is held."""

    def check(self, rendered: Rendered, params: SamplingParams, *, length: bool) -> Rendered:
        """The prompt, cut where the request asks for it. Raises RequestError for a prompt that no
        engine of this model takes.

        `length`: a prompt that is too long is refused.
        """
        token_ids = rendered.token_ids
        features = rendered.features
        check_token_ids(token_ids, self.vocab_size)
        if self.renderer.rules is not None:
            with self.plugins.boundary:
                check_placeholders(features or [], token_ids, self.renderer.rules)
        longest = self.config.max_model_len
        if params.truncate_prompt_tokens is not None:
            cut = cut_prompt(token_ids, params, longest)
            features = cut_features(features or [], len(token_ids) - len(cut)) or None
            token_ids = cut
        if length and len(token_ids) >= longest:
            whole = (
                f"the prompt has {len(token_ids)} tokens; this model's maximum context length is "
                f"{longest} tokens (max_model_len)"
            )
            raise ContextLengthError(f"{whole}, output included. Shorten it.", "prompt")
        return Rendered(token_ids, features)


class Render:
    """The routes that render prompts, and the one that makes text of tokens."""

    def __init__(self, rendering: Rendering, options: ServerOptions, models: Models) -> None:
        """`models`: the served model, whose rendering is held to the server's budget."""
        self._rendering = rendering
        self._options = options
        self._models = models

    async def chat(self, body: ChatRenderBody, request: Request) -> Response:
        """The prompt of a chat completion, in tokens."""
        params = self._params(body)
        options = body.render_options()
        render = partial(self._rendering.renderer.render_conversation, body.messages, **options)
        with self._models[body.model].hold_rendering(
            [(body.messages, options)], {"context": request_context(request)}
        ):
            return await answer(
                lambda: self._rendered(render, params, body), media_type=accepted(request)
            )

    async def completion(self, body: CompletionRenderBody, request: Request) -> Response:
        """The prompts of a completion, in tokens."""
        params = self._params(body)
        render = partial(
            self._rendering.renderer.render_prompt, add_special_tokens=body.add_special_tokens
        )
        prompts: list[Any] = [*body.prompts(self._options.max_prompts)]

        def rendered() -> dict[str, Any]:
            # One at a time: texts may have far more tokens than fit in memory as Python integers.
            return {
                "object": "list",
                "data": (
                    self._rendered(partial(render, prompt), params, body) for prompt in prompts
                ),
            }

        with self._models[body.model].hold_rendering(
            prompts, {"context": request_context(request)}
        ):
            return await answer(rendered, media_type=accepted(request))

    async def derender(self, body: DerenderBody) -> Response:
        """The text that tokens add to a prompt."""
        self._models[body.model]
        for name, token_ids in (
            ("token_ids", body.token_ids),
            ("prompt_token_ids", body.prompt_token_ids),
        ):
            try:
                check_token_ids(token_ids, self._rendering.vocab_size, name)
            except RequestError as error:
                raise ApiError(400, str(error), param=name) from None

        def text() -> dict[str, Any]:
            with self._rendering.plugins.boundary:
                stream = self._rendering.renderer.decode_stream(
                    body.prompt_token_ids, skip_special_tokens=body.skip_special_tokens
                )
                return {"text": stream.push(body.token_ids) + stream.flush()}

        return await answer(text)

    def _params(self, body: ChatRenderBody | CompletionRenderBody) -> SamplingParams:
        """The sampling parameters of a request, checked. Raises ApiError and RequestError."""
        self._models[body.model]
        params: SamplingParams = body.params()
        check_bounds(params, self._rendering.config.limits)
        return params

    def _rendered(
        self, render: Callable[[], Rendered], params: SamplingParams, body: Held
    ) -> dict[str, Any]:
        held = self._rendering.held
        with held.of(body.held, body.media_owner), self._rendering.plugins.boundary:
            rendered = held.without_data(render())
        rendered = self._rendering.check(rendered, params, length=body.check_length)
        fields = {
            name: value
            for name, value in structs.asdict(params).items()
            if value != getattr(_UNSAID, name)
        }
        # How outputs are to come is between a client and its engine.
        fields.pop("output_kind", None)
        return {
            "model": self._rendering.served_model_name,
            "token_ids": rendered.token_ids,
            "features": rendered.features or None,
            "sampling_params": fields,
            "max_model_len": self._rendering.config.max_model_len,
        }


def create_render_app(
    rendering: Rendering,
    options: ServerOptions,
    *,
    metrics: Metrics,
    readiness: Readiness,
    keys: Keys | None = None,
) -> FastAPI:
    """An app that renders for engines elsewhere. Raises ConfigError, PluginError as `create_router`
    does."""
    keys = keys or Keys.of(options)
    router = APIRouter(route_class=route_class(options, keys, readiness, metrics))
    budgeted: ServedModel = BudgetedModel(rendering, CostBudget(options.max_request_bytes))
    models = by_model(budgeted)
    render = Render(rendering, options, models)
    unknown = described(404)
    served = Served(models)
    tokens = Tokens(models)
    for path, handler, body, whole_answer in (
        ("/v1/chat/completions/render", render.chat, ChatRenderBody, RenderedPrompt),
        ("/v1/completions/render", render.completion, CompletionRenderBody, RenderedList),
    ):
        whole = body_of(
            body, rendering.plugins.logits_processors, rendering.config.sampling_defaults
        )
        router.add_api_route(
            path,
            with_body(handler, whole),
            methods=["POST"],
            response_model=None,
            responses=answers(whole_answer) | unknown,
        )
    for path, convert, kind in (
        ("/derender", render.derender, Derendered),
        ("/tokenize", tokens.tokenize, TokenIds),
        ("/detokenize", tokens.detokenize, Text),
    ):
        router.add_api_route(
            path, convert, methods=["POST"], response_model=None, responses=answers(kind) | unknown
        )
    router.add_api_route(
        "/v1/models", served.models, response_model=None, responses=answers(ModelList)
    )
    router.add_api_route(
        "/v1/models/{model:path}",
        served.model,
        response_model=None,
        responses=answers(ModelCard) | unknown,
    )
    add_own_routes(router, options, keys, readiness, metrics)
    app = make_app(options)
    serve_routes(app, router)
    return app
