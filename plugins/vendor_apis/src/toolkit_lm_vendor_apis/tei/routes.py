"""Text Embeddings Inference's routes, as far as they are about using a model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from toolkit_lm import __version__
from toolkit_lm.errors import RequestError
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.processing import check_token_ids
from toolkit_lm_server.answer_schemas import answers
from toolkit_lm_server.answers import encoded
from toolkit_lm_server.errors import ApiError, as_api_error, described, renamed, validated
from toolkit_lm_server.plugin_routes import OpenAIApi
from toolkit_lm_server.pooled import pool, sparse
from toolkit_lm_server.pooling_protocol import RerankBody
from toolkit_lm_server.reranking import Reranking
from toolkit_lm_server.threads import aside

from toolkit_lm_vendor_apis.route_kinds import route_kind
from toolkit_lm_vendor_apis.tei import schemas
from toolkit_lm_vendor_apis.tei.body import (
    NAMES,
    Comparing,
    DecodeBody,
    InputsBody,
    PredictBody,
    SimilarityBody,
    TeiEmbedBody,
    TeiRerankBody,
    check_size,
    most_tokens,
)
from toolkit_lm_vendor_apis.tei.errors import TeiError, refusal

if TYPE_CHECKING:
    from toolkit_lm.outputs import PoolingRequestOutput
    from toolkit_lm_serving.engine import ServingEngine

_FIELDS = {"truncate_prompt_tokens": "truncate"}


class Tei:
    """Vectors, labels and ranks, as Text Embeddings Inference has them."""

    def __init__(self, api: OpenAIApi) -> None:
        self._api = api
        self._most = api.options.max_inputs
        self._reranking = Reranking(api.engines, api.options)

    async def embed(self, body: TeiEmbedBody, request: Request) -> Response:
        """Embeds each input as one vector."""
        params = PoolingParams(task="embed", dimensions=body.dimensions, normalize=body.normalize)
        outputs = await self._pool(body, request, params)
        return await _listed(lambda: [_array(output).tolist() for output in outputs])

    async def embed_all(self, body: InputsBody, request: Request) -> Response:
        """Embeds each token of each input."""
        outputs = await self._pool(body, request, PoolingParams(task="token_embed"))
        return await _listed(lambda: [_array(output).tolist() for output in outputs])

    async def embed_sparse(self, body: InputsBody, request: Request) -> Response:
        """Embeds each input as the entries that are not 0 of a vector over the vocabulary."""
        engine = self._api.engines[body.model]
        _check_task(engine, "embed")
        # The weights of BGE-M3 are of tokens, and those of SPLADE are the vector itself.
        task: Literal["token_classify", "embed"]
        task = "token_classify" if "token_classify" in engine.tasks else "embed"
        outputs = await self._pool(body, request, PoolingParams(task=task))
        if any(
            _array(output).ndim == 1 and _array(output).size != engine.config.vocab_size
            for output in outputs
        ):
            raise _other_model("gives no sparse vectors", engine)

        def made() -> list[list[dict[str, Any]]]:
            vectors = map(sparse, outputs)
            return [
                [
                    {"index": index, "value": value}
                    for index, value in zip(vector["indices"], vector["values"], strict=True)
                ]
                for vector in vectors
            ]

        return await _listed(made)

    async def predict(self, body: PredictBody, request: Request) -> Response:
        """The labels of each input with their scores, the likeliest first."""
        engine = self._api.engines[body.model]
        inputs = await aside(body.texts, self._most)
        params = PoolingParams(task="classify", use_activation=False if body.raw_scores else None)
        _check_task(engine, "classify")
        names = [f"inputs[{index}]" for index in range(len(inputs))]
        prompts = [texts[0] if len(texts) == 1 else (texts[0], texts[1]) for texts in inputs]
        outputs = await pool(
            engine,
            body,
            request,
            prompts,
            params,
            names=names if body.is_several else ["inputs"],
            fields=_FIELDS,
            truncate_prompt_tokens=body.most_tokens(engine.config.max_model_len),
        )
        labels = engine.config.hf_config.get("id2label") or {}
        found = [_labels(_array(output), labels) for output in outputs]
        return await _listed(lambda: found if body.is_several else found[0])

    async def rerank(self, body: TeiRerankBody, request: Request) -> Response:
        """Ranks texts by how well they fit the query, best first."""
        body.check()
        engine = self._api.engines[body.model]
        texts = body.texts
        fields = body.model_dump(
            exclude_unset=True,
            exclude={"texts", "raw_scores", "return_text", "truncate", "truncation_direction"},
        )
        if texts is None:
            return await self._reranking.rerank(await aside(validated, RerankBody, fields), request)
        check_size(texts, self._most)
        if not texts:
            raise RequestError("texts is an empty list: give at least one.", "texts")
        longest = most_tokens(body.truncate, body.truncation_direction, engine.config.max_model_len)
        fields |= {"documents": texts, "truncate_prompt_tokens": longest}
        fields |= {"use_activation": False} if body.raw_scores else {}
        sides: dict[str, str | list[str]] = {"query": body.query, "texts": texts}
        whole = await aside(validated, RerankBody, fields)
        try:
            scores, _ = await self._reranking.scored(engine, whole, request, sides)
        except ApiError as error:
            if error.body["error"]["param"] != "task":
                raise
            raise ApiError(424, error.body["error"]["message"] or "") from None
        order = sorted(range(len(texts)), key=lambda index: -scores[index])
        return await _listed(
            lambda: [
                {"index": index, "score": scores[index]}
                | ({"text": texts[index]} if body.return_text else {})
                for index in order
            ]
        )

    async def similarity(self, body: SimilarityBody, request: Request) -> Response:
        """The cosine of each text with the first."""
        how = body.parameters or Comparing()
        check_size(body.inputs.sentences, self._most - 1)
        if not body.inputs.sentences:
            raise RequestError("inputs.sentences is an empty list: give at least one.", "inputs")
        texts: list[Any] = [body.inputs.source_sentence, *body.inputs.sentences]
        whole = TeiEmbedBody(
            inputs=texts,
            prompt_name=how.prompt_name,
            truncate=how.truncate,
            truncation_direction=how.truncation_direction,
            **body.model_dump(exclude={"inputs", "parameters"}),
        )
        outputs = await self._pool(whole, request, PoolingParams(task="embed", normalize=True))
        first, *others = map(_array, outputs)
        return await _listed(lambda: [float(np.dot(first, other)) for other in others])

    async def decode(self, body: DecodeBody) -> Response:
        """The text of each list of token ids."""
        renderer = self._api.engines[body.model].renderer
        skip = body.skip_special_tokens

        def made() -> list[str]:
            lists = body.lists(self._most)
            for ids in lists:
                check_token_ids(ids, renderer.vocab_size, "ids")
            return [renderer.decode(ids, skip_special_tokens=skip) for ids in lists]

        return await _listed(made)

    async def info(self) -> dict[str, Any]:
        """Properties of the model, and the server's limits."""
        engine = self._api.engines[None]
        config = engine.config
        return {
            "model_id": config.model.model,
            "model_sha": config.model.revision,
            "model_dtype": config.model.dtype,
            "model_type": _model_type(engine),
            "max_concurrent_requests": config.limits.max_queued_requests
            or config.scheduler.max_num_seqs,
            "max_input_length": config.max_model_len,
            "max_batch_tokens": config.scheduler.max_num_batched_tokens or config.max_model_len,
            "max_batch_requests": config.scheduler.max_num_seqs,
            "max_client_batch_size": self._most,
            "auto_truncate": False,
            "tokenization_workers": os.cpu_count() or 1,
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }

    async def _pool(
        self, body: InputsBody, request: Request, params: PoolingParams
    ) -> list[PoolingRequestOutput]:
        engine = self._api.engines[body.model]
        _check_task(engine, params.task)
        try:
            prompts, names = await aside(body.prompts, self._most)
            return await pool(
                engine,
                body,
                request,
                prompts,
                params,
                names=names,
                fields=_FIELDS,
                prompt_name=body.prompt_name,
                truncate_prompt_tokens=body.most_tokens(engine.config.max_model_len),
            )
        except RequestError as error:
            raise renamed(as_api_error(error), NAMES) from error


def _check_task(engine: ServingEngine, task: str) -> None:
    """Raises ApiError (424) for a task that the model does not serve."""
    if task not in engine.tasks:
        raise _other_model(f"does not serve the task {task}", engine)


def _other_model(why: str, engine: ServingEngine) -> ApiError:
    return ApiError(424, f"the model {why}. It serves: {', '.join(engine.tasks)}.")


def _array(output: PoolingRequestOutput) -> np.ndarray:
    assert output.outputs.data is not None, "`pool` gives results with data"
    return output.outputs.data


def _labels(scores: np.ndarray, labels: dict[str, str]) -> list[dict[str, Any]]:
    """The labels with their scores, the likeliest first."""
    return [
        {"score": float(scores[index]), "label": labels.get(str(index), f"LABEL_{index}")}
        for index in np.argsort(-scores, kind="stable").tolist()
    ]


def _model_type(engine: ServingEngine) -> dict[str, Any]:
    """The kind of the model, with its properties; empty for one that only generates."""
    labels = engine.config.hf_config.get("id2label") or {}
    about = {"id2label": labels, "label2id": {text: index for index, text in labels.items()}}
    if "classify" in engine.tasks:
        return {"classifier" if len(labels) > 1 else "reranker": about}
    if "embed" not in engine.tasks:
        return {"reranker": about} if "score" in engine.tasks else {}
    return {"embedding": {"pooling": str(engine.config.pooler.pooling_type).lower()}}


async def _listed(make: Callable[[], Sequence[Any]]) -> Response:
    """The answer with a list, which a thread makes."""
    content = await asyncio.to_thread(lambda: bytes(encoded(make())))
    return Response(content, media_type="application/json")


def add_routes(router: APIRouter, api: OpenAIApi) -> None:
    """Adds the routes."""
    tei = Tei(api)
    kind = route_kind(router, TeiError, refusal)
    shared = route_kind(router, TeiError, refusal, replaces=True)
    limits = described(404, 413, 424, 429, 504, kind=TeiError)
    posts: list[tuple[str, Callable[..., Any], type, type]] = [
        ("/embed", tei.embed, schemas.TeiVectors, kind),
        ("/embed_all", tei.embed_all, schemas.TeiTokenVectors, kind),
        ("/embed_sparse", tei.embed_sparse, schemas.TeiSparseVectors, kind),
        ("/predict", tei.predict, schemas.TeiLabels, kind),
        ("/rerank", tei.rerank, schemas.TeiRanks, shared),
        ("/similarity", tei.similarity, schemas.TeiSimilarities, kind),
        ("/decode", tei.decode, schemas.TeiTexts, kind),
    ]
    for path, handler, made, route in posts:
        router.add_api_route(
            path,
            handler,
            methods=["POST"],
            response_model=None,
            responses=answers(made) | limits,
            route_class_override=route,
        )
    router.add_api_route(
        "/info",
        tei.info,
        response_model=None,
        responses=answers(schemas.TeiInfo),
        route_class_override=kind,
    )
