"""SGLang's POST /encode: vectors of prompts."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from fastapi import Request, Response
from toolkit_lm.errors import RequestError
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm_server.answers import encoded
from toolkit_lm_server.errors import as_api_error, missing, renamed
from toolkit_lm_server.fields import Items
from toolkit_lm_server.plugin_routes import OpenAIApi
from toolkit_lm_server.pooled import pool
from toolkit_lm_server.pooling_protocol import read_inputs
from toolkit_lm_server.protocol import EngineBody, examples
from toolkit_lm_server.request_fields import POOLING, refused

from toolkit_lm_vendor_apis.sglang.body import id_of


class SglangEncodeBody(EngineBody):
    """The body of POST /encode."""

    verdicts = {
        **POOLING,
        **refused("send them to /v1/embeddings", "audio_data video_data"),
    }
    model_config = examples({"text": "Once upon a time"}, {"input_ids": [[5, 6, 7], [8, 9]]})

    text: str | Items[str] | None = None
    """The prompts, as texts."""
    input_ids: Items[int] | Items[Items[int]] | None = None
    """The prompts, as token ids, in place of texts."""
    rid: str | Items[str] | None = None
    """Ids of the requests, which the answers tell."""
    dimensions: int | None = None
    """Dimensions that vectors are cut to, for models that allow it."""

    def check(self) -> tuple[Any, str]:
        """The prompts, and the field that has them. Raises ApiError and RequestError."""
        if self.text is not None and self.input_ids is not None:
            raise RequestError("give either text or input_ids, not both.", "text")
        if self.text is not None:
            return self.text, "text"
        if self.input_ids is None:
            raise missing("text")
        return self.input_ids, "input_ids"


class Encoding:
    """A vector of each prompt, as SGLang has them."""

    def __init__(self, api: OpenAIApi) -> None:
        self._api = api

    async def encode(self, body: SglangEncodeBody, request: Request) -> Response:
        """Embeds one or several prompts, each as one vector."""
        start = time.perf_counter()
        engine = self._api.engines[body.model]
        value, field = body.check()
        try:
            inputs = read_inputs(value, self._api.options.max_inputs)
            outputs = await pool(
                engine,
                body,
                request,
                inputs.prompts,
                PoolingParams(task="embed", dimensions=body.dimensions),
                names=[name.replace("input", field, 1) for name in inputs.names],
            )
        except Exception as error:
            raise renamed(as_api_error(error), {"input": field}) from error
        seconds = time.perf_counter() - start
        name = uuid.uuid4().hex
        is_several = inputs.names != ["input"]

        def made() -> bytes:
            found = [
                {
                    "embedding": output.outputs.data.tolist(),  # type: ignore[union-attr]
                    "meta_info": {
                        "id": id_of(body.rid, index, f"{name}-{index}"),
                        "finish_reason": {"type": "stop", "matched": None},
                        "prompt_tokens": len(output.prompt_token_ids),
                        "cached_tokens": 0,
                        "e2e_latency": seconds,
                    },
                }
                for index, output in enumerate(outputs)
            ]
            return bytes(encoded(found if is_several else found[0]))

        return Response(await asyncio.to_thread(made), media_type="application/json")
