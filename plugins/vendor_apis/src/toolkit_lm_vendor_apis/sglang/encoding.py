"""SGLang's POST /encode and /classify: numbers of prompts."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from fastapi import Request, Response
from toolkit_lm.errors import RequestError
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm_server.answers import encoded
from toolkit_lm_server.embeddings import Embeddings
from toolkit_lm_server.errors import as_api_error, missing, renamed
from toolkit_lm_server.fields import Items
from toolkit_lm_server.plugin_routes import OpenAIApi
from toolkit_lm_server.pooled import pool
from toolkit_lm_server.pooling_protocol import ClassifyBody, read_inputs
from toolkit_lm_server.protocol import EngineBody, examples
from toolkit_lm_server.request_fields import POOLING, refused
from toolkit_lm_server.threads import aside

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


class SglangClassifyBody(ClassifyBody):
    """The body of POST /classify: SGLang's has `text`, and vLLM's has `input` or `messages`."""

    model_config = examples({"text": "Once upon a time"}, {"input": "Once upon a time"})

    text: str | Items[str] | None = None
    """The prompts, as texts: the answer has their logits."""
    rid: str | Items[str] | None = None
    """Ids of the requests. It is for `text`."""


class Encoding:
    """Numbers of each prompt, as SGLang has them."""

    def __init__(self, api: OpenAIApi) -> None:
        self._api = api
        self._embeddings = Embeddings(api.engines, api.options)

    async def encode(self, body: SglangEncodeBody, request: Request) -> Response:
        """Embeds one or several prompts, each as one vector."""
        value, field = body.check()
        params = PoolingParams(task="embed", dimensions=body.dimensions)
        return await self._answer(body, request, value, field, params, body.rid)

    async def classify(self, body: SglangClassifyBody, request: Request) -> Response:
        """The logits of one or several prompts; or vLLM's answer where there is no `text`."""
        if body.text is None:
            if body.rid is not None:
                raise RequestError("rid is for text.", "rid")
            return await self._embeddings.classify(body, request)
        if body.input is not None or body.messages is not None:
            raise RequestError("Give one of 'text', 'input' and 'messages'.", "text")
        body.refuse_render_options()
        if body.add_special_tokens is False:
            raise RequestError("add_special_tokens false is for input.", "add_special_tokens")
        params = PoolingParams(task="classify", use_activation=bool(body.use_activation))
        return await self._answer(
            body,
            request,
            body.text,
            "text",
            params,
            body.rid,
            prompt_name=body.prompt_name,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )

    async def _answer(
        self,
        body: EngineBody,
        request: Request,
        value: Any,
        field: str,
        params: PoolingParams,
        rid: str | list[str] | None,
        **how: Any,
    ) -> Response:
        """The numbers of the prompts in `value`. `field`: the body's field that has them. `how`:
        keywords of AsyncLLM.encode_many."""
        start = time.perf_counter()
        engine = self._api.engines[body.model]
        try:
            inputs = await aside(read_inputs, value, self._api.options.max_inputs)
            outputs = await pool(
                engine,
                body,
                request,
                inputs.prompts,
                params,
                names=[name.replace("input", field, 1) for name in inputs.names],
                **how,
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
                        "id": id_of(rid, index, f"{name}-{index}"),
                        "finish_reason": {"type": "stop", "matched": None},
                        "prompt_tokens": len(output.prompt_token_ids),
                        "cached_tokens": output.num_cached_tokens,
                        "e2e_latency": seconds,
                    },
                }
                for index, output in enumerate(outputs)
            ]
            return bytes(encoded(found if is_several else found[0]))

        return Response(await asyncio.to_thread(made), media_type="application/json")
