"""Activations by the names that checkpoints use (`hidden_act`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm.errors import UnsupportedError, nearest

Activation = Callable[[Tensor], Tensor]


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_10(x: Tensor) -> Tensor:
    return F.gelu(x).clamp_(-10, 10)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square_()


_GELU_TANH = partial(F.gelu, approximate="tanh")

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_10": _gelu_10,
        "gelu_accurate": _GELU_TANH,
        "gelu_fast": _GELU_TANH,
        "gelu_new": _GELU_TANH,
        "gelu_python": F.gelu,
        "gelu_pytorch_tanh": _GELU_TANH,
        "quick_gelu": _quick_gelu,
        "relu": F.relu,
        "relu2": _relu2,
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
        "swish": F.silu,
        "tanh": torch.tanh,
    }
)


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return (up.clamp(-7, 7) + 1) * _quick_gelu(gate.clamp(max=7))


GATES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"clamped_swiglu": _clamped_swiglu}
)
"""Functions of gate and up other than activation(gate) * up, which `gate` accepts too."""


def get_activation(name: str) -> Activation:
    """Returns the elementwise function of that name, which never writes to its argument. Raises
    UnsupportedError for an unknown name."""
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"unknown activation {name!r}. {nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def gate(x: Tensor, activation: str) -> Tensor:
    """[gate, up] side by side [T, 2 * size] -> activation(gate) * up [T, size] (Shazeer 2020:
    SwiGLU, GeGLU, ...), or one of GATES."""
    first, up = x.chunk(2, dim=-1)
    if activation in GATES:
        return GATES[activation](first, up)
    return get_activation(activation)(first).mul_(up)
