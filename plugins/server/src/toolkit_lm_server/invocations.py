"""The route POST /invocations, as SageMaker asks a container. The body's fields tell which route is
meant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response

from toolkit_lm_server.chat import Chat
from toolkit_lm_server.completions import Completions
from toolkit_lm_server.embeddings import Embeddings
from toolkit_lm_server.engines import Engines
from toolkit_lm_server.errors import ApiError, validated
from toolkit_lm_server.pooling_protocol import (
    AnyPoolingBody,
    ClassifyBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
)
from toolkit_lm_server.protocol import Body
from toolkit_lm_server.reranking import Reranking
from toolkit_lm_server.threads import aside

Handler = Callable[[Any, Request], Awaitable[Response]]


class Invocations:
    """Hands a body to the route whose fields it has."""

    def __init__(
        self,
        engines: Engines,
        chat: Chat,
        completions: Completions,
        embeddings: Embeddings,
        reranking: Reranking,
    ) -> None:
        self._engines = engines
        self._generating: dict[str, tuple[Handler, type[Body]]] = {
            "messages": (chat.create, chat.body),
            "prompt": (completions.create, completions.body),
        }
        self._scoring: dict[str, tuple[Handler, type[Body]]] = {
            "query": (reranking.rerank, RerankBody),
            "queries": (reranking.score, ScoreBody),
            "text_1": (reranking.score, ScoreBody),
        }
        self._pooling: dict[str, tuple[Handler, type[Body]]] = {
            "embed": (embeddings.embed, EmbeddingBody),
            "classify": (embeddings.classify, ClassifyBody),
        }
        self._any_pooling: tuple[Handler, type[Body]] = embeddings.pooling, AnyPoolingBody

    async def create(self, body: dict[str, Any], request: Request) -> Response:
        """Answers as the route of such bodies: chats, completions, embeddings, classes, pooling,
        scores, ranks."""
        handler, kind = self._route(body)
        return await handler(await aside(validated, kind, body), request)

    def _route(self, body: dict[str, Any]) -> tuple[Handler, type[Body]]:
        name = body.get("model")
        # A model that is not served is refused by the route.
        engine = (self._engines.get(name) if isinstance(name, str) else None) or self._engines[None]
        tasks = engine.tasks
        generates = "generate" in tasks
        for name, route in {
            **(self._generating if generates or "prompt" in body else {}),
            **self._scoring,
        }.items():
            if name in body:
                return route
        if "input" in body or "messages" in body:
            return next(
                (
                    route
                    for task, route in self._pooling.items()
                    if task in tasks and "task" not in body
                ),
                self._any_pooling,
            )
        names = ", ".join([*self._generating, "input", *self._scoring])
        raise ApiError(400, f"The body has the fields of no route. It needs one of: {names}.")
