"""The engine's work for one HTTP request to a pooling model: all of its inputs at once, and parts
of its answer."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import Request, Response
from toolkit_lm.errors import RequestError
from toolkit_lm.outputs import PoolingRequestOutput
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.prompts import Prompt, TextPair

from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.generation import model_failure
from toolkit_lm_server.pooling_protocol import CohereType, EmbeddingBody, EmbedDtype, EncodingFormat
from toolkit_lm_server.protocol import EngineBody
from toolkit_lm_server.route import check_priority, request_context

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServingEngine

_MOST_TOLD = 256
"""Most results that a header tells of. Clients read lines of up to 64 KiB."""


async def pool(
    engine: ServingEngine,
    body: EngineBody,
    request: Request,
    prompts: Sequence[Prompt | TextPair],
    params: PoolingParams,
    *,
    names: Sequence[str],
    fields: Mapping[str, str] = MappingProxyType({}),
    **how: Any,
) -> list[PoolingRequestOutput]:
    """The results of all prompts, each with data. `names` and `how` are keywords of
    AsyncLLM.encode_many.

    `fields`: the route's names of parameters, by our names.

    Raises RequestError. Raises ApiError: (500) where the model fails on a prompt, (504) when the
    time is over.
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
            raise ApiError(
                504,
                "The request's timeout was over before all of its inputs were computed.",
                code="timeout",
            )
        if output.outputs.data is None:
            raise model_failure(name, str(output.error or output.finish_reason))
    return outputs


def head(engine: ServingEngine, prefix: str) -> dict[str, Any]:
    """The first fields of an answer from a pooling model."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": engine.served_model_name,
    }


def usage(outputs: Sequence[PoolingRequestOutput]) -> dict[str, Any]:
    """Token counts of pooled inputs."""
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": tokens,
        "completion_tokens": 0,
        "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def encoded(
    data: np.ndarray | None,
    form: EncodingFormat,
    dtype: EmbedDtype = "float32",
    order: str = "little",
) -> Any:
    """An array as nested lists, or base64 of its values in C order, with this dtype and byte
    order."""
    assert data is not None, "`pool` gives results with data"
    return (
        data.tolist() if form == "float" else base64.b64encode(packed(data, dtype, order)).decode()
    )


def sparse(output: PoolingRequestOutput) -> dict[str, Any]:
    """A vector's entries that are not 0, by ascending index. Of weights of the prompt's tokens, the
    greatest of each token id.

    Raises RequestError for several numbers a token.
    """
    data = output.outputs.data
    assert data is not None, "`pool` gives results with data"
    if data.ndim == 1:
        indices = data.nonzero()[0]
        return {"indices": indices.tolist(), "values": data[indices].tolist()}
    if data.shape[1] != 1:
        raise RequestError(
            f"sparse true is for one weight a token, and this model gives {data.shape[1]} numbers.",
            "sparse",
        )
    ids, places = np.unique(output.prompt_token_ids, return_inverse=True)
    values = np.zeros(len(ids), np.float32)
    np.maximum.at(values, places, data[:, 0])
    counts = values > 0
    return {"indices": ids[counts].tolist(), "values": values[counts].tolist()}


def in_bytes(
    outputs: Sequence[PoolingRequestOutput], body: EmbeddingBody, start: dict[str, Any]
) -> Response:
    """An answer with the values of all results, one after the other. A header tells where each is,
    as in vLLM. `start`: the fields of `head`.

    Raises RequestError for more results than a header has room for.
    """
    assert body.encoding_format in ("bytes", "bytes_only")
    if body.encoding_format == "bytes" and len(outputs) > _MOST_TOLD:
        message = (
            f"encoding_format bytes is for up to {_MOST_TOLD} inputs, not {len(outputs):,}: a "
            "header tells of each. Use bytes_only."
        )
        raise RequestError(message, "encoding_format")
    parts = []
    items = []
    end = 0
    for index, output in enumerate(outputs):
        assert output.outputs.data is not None, "`pool` gives results with data"
        parts.append(packed(output.outputs.data, body.embed_dtype, body.endianness))
        begin, end = end, end + len(parts[-1])
        metadata = {
            "embed_dtype": body.embed_dtype,
            "endianness": body.endianness,
            "shape": output.outputs.data.shape,
        }
        items.append({"index": index, "start": begin, "end": end, **metadata})
    fields = {**start, "data": items, "usage": usage(outputs)}
    headers = (
        {"metadata": json.dumps(fields, separators=(",", ":"))}
        if body.encoding_format == "bytes"
        else {}
    )
    return Response(b"".join(parts), media_type="application/octet-stream", headers=headers)


def packed(data: np.ndarray, dtype: EmbedDtype, order: str) -> bytes:
    """The bytes of an array in C order, with this dtype and byte order. "big" is big-endian, and
    all else little-endian."""
    match dtype:
        case "bfloat16":
            values = _upper_half(data.astype(np.float32, copy=False), np.uint32, np.uint16)
        case "fp8_e5m2":
            values = _upper_half(data.astype(np.float16), np.uint16, np.uint8)
        case "fp8_e4m3":
            values = _e4m3(data)
        case _:
            values = data.astype(dtype, copy=False)
    return values.astype(
        values.dtype.newbyteorder(">" if order == "big" else "<"), copy=False
    ).tobytes()


def _upper_half(
    data: np.ndarray, whole: type[np.unsignedinteger[Any]], half: type[np.unsignedinteger[Any]]
) -> np.ndarray:
    """The upper halves of values' bits, rounded to nearest even. bfloat16 is the upper half of
    float32, and e5m2 that of float16."""
    bits = data.view(whole).astype(np.uint64)
    size = 8 * np.dtype(half).itemsize
    halves: np.ndarray = ((bits + (1 << size - 1) - 1 + ((bits >> size) & 1)) >> size).astype(half)
    return halves


_STEPS = np.arange(8) / 8
_E4M3 = np.concatenate([_STEPS / 64, *((1 + _STEPS) * 2.0**exponent for exponent in range(-6, 9))])[
    :127
]
"""The values of e4m3 from 0, by their codes. e4m3 has no infinity, and its last code is NaN."""


def _e4m3(data: np.ndarray) -> np.ndarray:
    """Codes of the nearest values, with ties to even. A value beyond the largest gets the largest's
    code."""
    size = np.minimum(np.abs(data), _E4M3[-1])
    above = np.clip(np.searchsorted(_E4M3, size), 1, len(_E4M3) - 1)
    low = size - _E4M3[above - 1]
    high = _E4M3[above] - size
    codes = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    signed: np.ndarray = (codes + 128 * np.signbit(data)).astype(np.uint8)
    return signed


def quantized(data: np.ndarray | None, form: CohereType) -> Any:
    """A vector in Cohere's types: floats, integers for values from -1 to 1, or bits, eight to a
    number."""
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
