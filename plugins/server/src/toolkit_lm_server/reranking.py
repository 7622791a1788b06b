"""The routes POST /score and /rerank, and Cohere's /v2/rerank."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from toolkit_lm.errors import RequestError
from toolkit_lm.outputs import PoolingRequestOutput
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.prompts import Scored

from toolkit_lm_server.answers import answer
from toolkit_lm_server.engines import Engines
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.pooled import head, pool, usage
from toolkit_lm_server.pooling_protocol import (
    CohereRerankBody,
    RerankBody,
    ScoreBody,
    read_documents,
)
from toolkit_lm_server.route import request_context

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServingEngine


class Reranking:
    """Scores of documents for queries, by a cross-encoder, a bi-encoder or late interaction."""

    def __init__(self, engines: Engines, options: ServerOptions) -> None:
        self._engines = engines
        self._options = options

    async def score(self, body: ScoreBody, request: Request) -> Response:
        """Scores one query with each document, or as many queries as documents, pair by pair."""
        engine = self._engines[body.model]
        scores, outputs = await self.scored(
            engine, body, request, body.texts(self._options.max_inputs)
        )
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ]
        return await answer(
            lambda: {**head(engine, "score"), "data": data, "usage": usage(outputs)}
        )

    async def rerank(self, body: RerankBody, request: Request) -> Response:
        """Ranks documents by how well they fit the query, best first."""
        engine = self._engines[body.model]
        documents = cut = read_documents(body.documents, "documents", self._options.max_inputs)
        if body.max_tokens_per_doc is not None:
            texts = [document for document in documents if isinstance(document, str)]
            with engine.hold_rendering(texts, {"context": request_context(request)}):
                texts = await asyncio.to_thread(_cut, engine, texts, body.max_tokens_per_doc)
            some = iter(texts)
            cut = [next(some) if isinstance(item, str) else item for item in documents]
        scores, outputs = await self.scored(
            engine, body, request, {"query": body.query, "documents": cut}
        )
        results = []
        for index in sorted(range(len(documents)), key=lambda i: -scores[i])[: body.top_n]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents and isinstance(documents[index], str):
                result["document"] = {"text": documents[index]}
            results.append(result)
        start = head(engine, "rerank")
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
        return await answer(
            lambda: {
                "id": start["id"],
                "model": start["model"],
                "results": results,
                "usage": usage(outputs),
                "meta": meta,
            }
        )

    async def cohere_rerank(self, body: CohereRerankBody, request: Request) -> Response:
        """Ranks documents like /rerank, with the defaults of Cohere's API."""
        return await self.rerank(body, request)

    async def scored(
        self,
        engine: ServingEngine,
        body: ScoreBody | RerankBody,
        request: Request,
        sides: Mapping[str, Scored | Sequence[Scored]],
    ) -> tuple[list[float], list[PoolingRequestOutput]]:
        """The scores of all pairs, and their outputs. `sides`: queries and documents, by their
        fields."""
        (query_field, queries), (document_field, documents) = sides.items()
        fields = (query_field, document_field)
        try:
            scoring = engine.processor.pooling.scoring(queries, documents, fields)
        except RequestError as error:
            raise (_not_there(error) if error.param == "task" else error) from None
        params = scoring.params(PoolingParams(use_activation=body.use_activation))
        try:
            outputs = await pool(
                engine,
                body,
                request,
                scoring.prompts,
                params,
                names=scoring.names,
                prompt_name=scoring.prompt_names,
                truncate_prompt_tokens=body.truncate_prompt_tokens,
                instruction=body.instruction,
            )
        except RequestError as error:
            raise await asyncio.to_thread(scoring.culprit, error) from None
        return [score.outputs.score for score in scoring.scores(outputs)], outputs


def _cut(engine: ServingEngine, texts: list[str], most: int) -> list[str]:
    """The beginnings of texts, in at most `most` tokens, special tokens included."""
    try:
        return engine.renderer.cut_texts(texts, most)
    except RequestError as error:
        if error.param == "max_tokens":
            raise RequestError(str(error), "max_tokens_per_doc") from None
        # The engine refuses the same text, and says which one it is.
        return texts


def _not_there(error: RequestError) -> ApiError:
    """The error (404) of a model that scores nothing. vLLM's server has no such route for it."""
    api_error = ApiError(404, str(error), param="task")
    api_error.extra_fields = {"detail": "Not Found"}
    return api_error
