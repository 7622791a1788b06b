"""Computing in float32 with weights in half precision, without a copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_HALVES = frozenset({torch.float16, torch.bfloat16})
_BLOCK_BYTES = 2**20
"""Bytes of a float32 block of a weight, small enough to stay in the processor's cache while it is
used."""


class Exact(TorchFunctionMode):
    """While active, functions take tensors of half precision as float32, each for as long as it
    computes. It holds for this thread only.

    Weights keep the values that half precision has given them; what is computed of them is not
    rounded.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            return _raised(func(*args, **kwargs))
        if func is F.linear and len(args) > 1 and args[1].dtype in _HALVES:
            return _linear(_raised(args[0]), args[1], *args[2:], **kwargs)
        if getattr(func, "__name__", "") == "__get__":
            # An attribute is read: of those that are tensors, views of weights, functions take them
            # as they take weights.
            found = func(*args, **kwargs)
            return found if isinstance(found, Tensor) else _raised(found)
        if func is Tensor.__getitem__:
            # The weights of one expert are taken as they are: in float32 the stack of all would be
            # much larger than what is used of it.
            return func(*args, **kwargs)
        args, kwargs = tree_map(_raised, (args, kwargs))
        return func(*args, **kwargs)


def _raised(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALVES else value
    return torch.float32 if isinstance(value, torch.dtype) and value in _HALVES else value


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = max(1, _BLOCK_BYTES // (4 * weight.shape[1]))
    product = torch.cat([F.linear(x, block.float()) for block in torch.split(weight, rows)], dim=-1)
    return product if bias is None else product + bias.float()
