"""One HTTP request's work in a pooling engine: all of its inputs at once, and parts of its answer."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import Request
from toolkit_lm.errors import RequestError
from toolkit_lm.outputs import PoolingRequestOutput
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.prompts import Prompt, TextPair

from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.generation import model_failure
from toolkit_lm_server.pooling_protocol import CohereType, EmbedDtype, EncodingFormat
from toolkit_lm_server.protocol import EngineBody, check_priority
from toolkit_lm_server.route import request_context

if TYPE_CHECKING:
    from toolkit_lm_async_llm import AsyncLLM


async def pool(
    engine: AsyncLLM,
    body: EngineBody,
    request: Request,
    prompts: Sequence[Prompt | TextPair],
    params: PoolingParams,
    *,
    names: Sequence[str],
    fields: Mapping[str, str] = MappingProxyType({}),
    **how: Any,
) -> list[PoolingRequestOutput]:
    """The results of all prompts, each with data. `names` and `how`: keywords of AsyncLLM.encode_many.

    `fields`: how the route calls parameters that other routes have under our names.

    Raises RequestError; ApiError (500) where the model fails on one of them, (504) when the time is over.
    """
    options = body.request_options(request_context(request))
    check_priority(engine, options)
    try:
        outputs = await engine.encode_many(prompts, params, names=names, **how, **options)
    except RequestError as error:
        for ours, theirs in fields.items():
            error.args = (str(error).replace(ours, theirs),)
            error.param = theirs if error.param == ours else error.param
        raise
    for output, name in zip(outputs, names, strict=True):
        if output.finish_reason == "timeout":
            raise ApiError(504, "The request's timeout was over before all of its inputs were computed.", code="timeout")
        if output.outputs.data is None:
            raise model_failure(name, str(output.error or output.finish_reason))
    return outputs


def head(engine: AsyncLLM, prefix: str) -> dict[str, Any]:
    """The first fields of an answer."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": engine.served_model_name,
    }


def usage(outputs: Sequence[PoolingRequestOutput]) -> dict[str, int]:
    """Token counts."""
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def encoded(data: np.ndarray | None, form: EncodingFormat, dtype: EmbedDtype = "float32", order: str = "little") -> Any:
    """An array as nested lists, or as base64 of its values in C order, of this type and byte order."""
    assert data is not None, "`pool` gives results with data"
    if form == "float":
        return data.tolist()
    values = _bfloat16(data) if dtype == "bfloat16" else data.astype(dtype, copy=False)
    return base64.b64encode(values.astype(values.dtype.newbyteorder(">" if order == "big" else "<"), copy=False).tobytes()).decode()


def _bfloat16(data: np.ndarray) -> np.ndarray:
    """The upper halves of float32 values, rounded to the nearest, of two the even one."""
    bits = data.astype(np.float32, copy=False).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def quantized(data: np.ndarray | None, form: CohereType) -> Any:
    """A vector as Cohere has it: also in whole numbers, for values from -1 to 1, or in bits, eight to a number."""
    assert data is not None, "`pool` gives results with data"
    match form:
        case "float" | "base64":
            return encoded(data, form)
        case "int8":
            return _steps(data).tolist()
        case "uint8":
            return (_steps(data) + 128).tolist()
        case "binary":
            return (np.packbits(data > 0).astype(np.int16) - 128).tolist()
        case "ubinary":
            return np.packbits(data > 0).tolist()


def _steps(data: np.ndarray) -> np.ndarray:
    steps: np.ndarray = np.clip(np.rint(data * 127), -128, 127).astype(np.int16)
    return steps
