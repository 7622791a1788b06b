"""llama.cpp's routes, as far as they are about using a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from toolkit_lm_server.answer_schemas import answers, streams
from toolkit_lm_server.errors import described
from toolkit_lm_server.plugin_routes import OpenAIApi
from toolkit_lm_server.pooled_schemas import Ranking
from toolkit_lm_server.protocol import body_of
from toolkit_lm_server.reranking import Reranking
from toolkit_lm_server.route import with_body

from toolkit_lm_vendor_apis.llama_cpp.about import About
from toolkit_lm_vendor_apis.llama_cpp.body import LlamaCompletionBody
from toolkit_lm_vendor_apis.llama_cpp.completing import Completing
from toolkit_lm_vendor_apis.llama_cpp.errors import LlamaError, refusal
from toolkit_lm_vendor_apis.llama_cpp.schemas import (
    LlamaAnswer,
    LlamaAnswers,
    LlamaProps,
    LlamaSlots,
    LlamaTemplate,
    LlamaText,
    LlamaTokens,
    LlamaVectors,
)
from toolkit_lm_vendor_apis.llama_cpp.slots import SlotAnswer, Slots
from toolkit_lm_vendor_apis.llama_cpp.tokens import LlamaTokenizer
from toolkit_lm_vendor_apis.llama_cpp.vectors import Vectors
from toolkit_lm_vendor_apis.route_kinds import route_kind


def add_routes(router: APIRouter, api: OpenAIApi) -> None:
    """Adds the routes."""
    engine = api.engines[None]
    body = body_of(
        LlamaCompletionBody, engine.plugins.logits_processors, engine.config.sampling_defaults
    )
    slots = Slots(api)
    completing = Completing(api, body, slots)
    about = About(api, body)
    tokenizer = LlamaTokenizer(api.engines)
    vectors = Vectors(api)
    ranks = Reranking(api.engines, api.options)
    kind = route_kind(router, LlamaError, refusal)
    shared = route_kind(router, LlamaError, refusal, replaces=True)
    limits = described(404, 429, 504, kind=LlamaError)
    not_there = described(501, kind=LlamaError)
    completion = streams(LlamaAnswers, LlamaAnswer, LlamaError)
    routes: list[tuple[str, str, Callable[..., Any], dict[int | str, Any], type]] = [
        ("POST", "/completion", with_body(completing.complete, body), completion | limits, kind),
        *(
            ("POST", path, vectors.embed, answers(LlamaVectors) | limits, kind)
            for path in ("/embedding", "/embeddings")
        ),
        *(
            ("POST", path, ranks.rerank, answers(Ranking) | limits, kind)
            for path in ("/reranking", "/v1/reranking")
        ),
        ("POST", "/apply-template", tokenizer.apply_template, answers(LlamaTemplate), kind),
        ("POST", "/tokenize", tokenizer.tokenize, answers(LlamaTokens), shared),
        ("POST", "/detokenize", tokenizer.detokenize, answers(LlamaText), shared),
        ("GET", "/props", about.props, answers(LlamaProps), kind),
        ("POST", "/props", about.set_props, not_there, kind),
        ("GET", "/slots", about.slots, answers(LlamaSlots), kind),
        ("POST", "/slots/{slot}", slots.change, answers(SlotAnswer) | not_there | limits, kind),
    ]
    for method, path, handler, responses, route in routes:
        router.add_api_route(
            path,
            handler,
            methods=[method],
            response_model=None,
            responses=described(404, kind=LlamaError) | responses,
            route_class_override=route,
        )
