"""Values of calls in msgpack: plain ones, tensors and arrays. Never pickle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from toolkit_lm.errors import RequestError
from torch import Tensor

_TENSOR = 1
_ARRAY = 2
_DTYPE = 3
"""Codes of msgpack extensions."""
_PLAIN = (bool, int, float, str, bytes, type(None))


class _Contents(msgspec.Struct, array_like=True, frozen=True):
    """Contents of a tensor, in C order."""

    dtype: str
    shape: list[int]
    data: bytes


def packed(value: Any, subject: str) -> Any:
    """Returns a value that msgpack can hold: tensors and arrays become extensions, and tuples
    lists. `subject` names the value in errors. Raises RequestError for a value of another type."""
    if isinstance(value, Tensor):
        tensor = value.detach().to("cpu").contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _extension(_TENSOR, str(tensor.dtype).removeprefix("torch."), tensor.shape, data)
    if isinstance(value, torch.dtype):
        return _extension(_DTYPE, str(value).removeprefix("torch."), (), b"")
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return _extension(_ARRAY, value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: packed(entry, f"{subject}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [packed(entry, f"{subject}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, _PLAIN):
        return value
    raise RequestError(
        f"{subject} is a {type(value).__name__}: calls carry numbers, texts, bytes, lists, "
        "mappings by text, dtypes of torch, tensors and arrays of numbers.",
        subject.partition("[")[0],
    )


def unpacked(value: Any) -> Any:
    """Returns the value that `packed` was given. Tensors are on the CPU, and own their memory.
    Raises RequestError for contents that are none."""
    if isinstance(value, msgspec.msgpack.Ext):
        return _made(value)
    if isinstance(value, dict):
        return {key: unpacked(entry) for key, entry in value.items()}
    return [unpacked(entry) for entry in value] if isinstance(value, list) else value


def _extension(code: int, dtype: str, shape: Any, data: bytes) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(_Contents(dtype, [*shape], data)))


def _made(extension: msgspec.msgpack.Ext) -> Tensor | np.ndarray | torch.dtype:
    makers: dict[int, Callable[[_Contents], Tensor | np.ndarray | torch.dtype]] = {
        _TENSOR: _tensor,
        _ARRAY: _array,
        _DTYPE: _dtype,
    }
    if extension.code not in makers:
        raise RequestError(f"a call has an extension {extension.code}: known are 1 to 3.", "args")
    try:
        contents = msgspec.msgpack.decode(extension.data, type=_Contents)
        return makers[extension.code](contents)
    except (msgspec.MsgspecError, TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"a tensor of a call cannot be read: {error}.", "args") from error


def _dtype(contents: _Contents) -> torch.dtype:
    dtype = getattr(torch, contents.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{contents.dtype!r} is no dtype of torch")
    return dtype


def _tensor(contents: _Contents) -> Tensor:
    dtype = _dtype(contents)
    flat = torch.frombuffer(bytearray(contents.data) or bytearray(1), dtype=torch.uint8)
    return flat[: len(contents.data)].view(dtype).reshape(contents.shape)


def _array(contents: _Contents) -> np.ndarray:
    dtype = np.dtype(contents.dtype)
    if dtype.kind not in "biuf":
        raise ValueError(f"{contents.dtype!r} is no dtype of numbers")
    return np.frombuffer(bytearray(contents.data), dtype).reshape(contents.shape)
