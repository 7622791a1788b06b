"""Tensors of vLLM's scripts: results of pooling requests, and prompts of embeddings."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import torch
from toolkit_lm import PoolingRequestOutput
from toolkit_lm.errors import RequestError

from toolkit_lm_vllm_names.embeds_format import LENGTH, PARAM


def as_tensors(outputs: list[PoolingRequestOutput]) -> list[PoolingRequestOutput]:
    """The same outputs, of which `outputs.data` is a tensor."""
    for output in outputs:
        data = output.outputs.data
        if data is not None:
            # mypy: the field is an array of core's. A copy: arrays are read-only.
            output.outputs.data = torch.tensor(data)  # type: ignore[assignment]
    return outputs


def encoded(tensor: Any) -> str:
    """Base64 of a tensor [n, H] or [1, n, H], as safetensors. Raises RequestError for other
    values."""
    if isinstance(tensor, torch.Tensor) and tensor.ndim == 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 2 or tensor.dtype not in names:
        shown = (
            f"a tensor {tuple(tensor.shape)} of {tensor.dtype}"
            if isinstance(tensor, torch.Tensor)
            else f"a {type(tensor).__name__}"
        )
        raise RequestError(
            f"{PARAM} must be a tensor [tokens, hidden size] of float32, float16 or bfloat16, not "
            f"{shown}.",
            PARAM,
        )
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    entry = {
        "dtype": names[tensor.dtype],
        "shape": list(tensor.shape),
        "data_offsets": [0, len(data)],
    }
    header = json.dumps({PARAM: entry}).encode()
    return b64encode(len(header).to_bytes(LENGTH, "little") + header + data).decode()
