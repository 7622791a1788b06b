"""llama.cpp's routes of vectors: POST /embedding and /embeddings."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import numpy as np
from fastapi import Request, Response
from pydantic import SkipValidation, WithJsonSchema
from toolkit_lm.errors import RequestError
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.prompts import Prompt, TokensPrompt
from toolkit_lm_server.answers import encoded
from toolkit_lm_server.errors import missing
from toolkit_lm_server.plugin_routes import OpenAIApi
from toolkit_lm_server.pooled import pool
from toolkit_lm_server.protocol import EngineBody, examples
from toolkit_lm_server.request_fields import POOLING
from toolkit_lm_server.route import request_context
from toolkit_lm_server.threads import aside

from toolkit_lm_vendor_apis.llama_cpp.body import PROMPT, is_several, prompts_of
from toolkit_lm_vendor_apis.llama_cpp.tokens import texts_of, token_ids_of

_WHOLE = 2
"""The norm of vectors where a body names none: their Euclidean length is 1."""
_MAX_ABS = 32760.0
"""The greatest number of a vector that is normalized by its greatest one: llama.cpp's, so that the
numbers fit into 16 bits."""
_MOST_NORM = 100


class LlamaEmbeddingBody(EngineBody):
    """The body of POST /embedding."""

    verdicts = {
        name: row for name, row in POOLING.items() if name not in ("content", "embd_normalize")
    }
    model_config = examples(
        {"content": "Once upon a time"},
        {"content": ["Once", "The cat"], "embd_normalize": -1},
    )

    content: Annotated[Any, SkipValidation, WithJsonSchema(PROMPT)] = None
    """The prompts: a text, a list of token ids that may have texts among them, or a list of
    prompts."""
    input: Annotated[Any, SkipValidation, WithJsonSchema(PROMPT)] = None
    """Another name of content."""
    embd_normalize: int = _WHOLE
    """The norm by which vectors are divided. -1: none. 0: their greatest number becomes 32760. 1:
    the sum of their numbers. 2: their Euclidean length. More: the norm of this degree."""

    def check(self) -> tuple[Any, str]:
        """The prompts, and the field that has them. Raises ApiError and RequestError."""
        if self.content is not None and self.input is not None:
            raise RequestError("give either content or input, not both.", "content")
        if self.content is None and self.input is None:
            raise missing("content")
        if not -1 <= self.embd_normalize <= _MOST_NORM:
            raise RequestError(f"embd_normalize must be from -1 to {_MOST_NORM}.", "embd_normalize")
        return (self.input, "input") if self.content is None else (self.content, "content")


class Vectors:
    """A vector of each prompt, as llama.cpp has them."""

    def __init__(self, api: OpenAIApi) -> None:
        self._api = api

    async def embed(self, body: LlamaEmbeddingBody, request: Request) -> Response:
        """Embeds each prompt as one vector."""
        engine = self._api.engines[body.model]
        value, field = body.check()
        most = self._api.options.max_inputs
        prompts = await aside(prompts_of, value, field, most, "max_inputs")
        texts = await aside(texts_of, prompts)
        made: list[Prompt] = []
        with engine.hold_rendering(texts, {"context": request_context(request)}):
            for prompt in prompts:
                if isinstance(prompt, str):
                    made.append(prompt)
                    continue
                ids = await token_ids_of(engine.renderer, prompt, add_special=True)
                made.append(TokensPrompt(prompt_token_ids=ids))
        is_list = await aside(is_several, value)
        names = [f"{field}[{index}]" for index in range(len(made))] if is_list else [field]
        outputs = await pool(
            engine,
            body,
            request,
            made,
            PoolingParams(task="embed", normalize=body.embd_normalize == _WHOLE),
            names=names,
        )

        def answered() -> bytes:
            vectors = [normalized(output.outputs.data, body.embd_normalize) for output in outputs]
            return bytes(
                encoded(
                    [
                        {"index": index, "embedding": [vector.tolist()]}
                        for index, vector in enumerate(vectors)
                    ]
                )
            )

        return Response(await asyncio.to_thread(answered), media_type="application/json")


def normalized(data: np.ndarray | None, norm: int) -> np.ndarray:
    """A vector of the model's own length, or of length 1 for the norm 2, divided by llama.cpp's
    norm of this number. A vector of zeros stays."""
    assert data is not None, "`pool` gives results with data"
    if norm in (-1, _WHOLE):
        return data
    size = np.abs(data).astype(np.float64)
    most = float(size.max(initial=0.0))
    if most == 0:
        return data
    # Powers of what is at most 1 do not overflow.
    whole = (
        most / _MAX_ABS if norm == 0 else most * float(((size / most) ** norm).sum() ** (1 / norm))
    )
    scaled: np.ndarray = (data / whole).astype(np.float32)
    return scaled
