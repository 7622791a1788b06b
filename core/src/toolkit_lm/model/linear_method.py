"""Linear methods: how layers hold their weights, and multiply with them. Each layer asks for a method of its own, by kind and name."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model.activation import get_activation
from toolkit_lm.model.parameters import Part, ShardLoader, new_parameter

LayerKind = Literal["linear", "embedding", "lm_head", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """What a layer asks of its method: to hold this rank's share of a weight W [outputs, inputs]. One axis at most is sharded."""

    kind: LayerKind
    """"experts": a projection of one of several experts."""
    prefix: str
    """The layer's name: "model.layers.0.self_attn.qkv_proj"."""
    inputs: Part
    outputs: tuple[Part, ...]
    """One after the other: of a layer that packs several of the checkpoint's weights, those of each."""
    dtype: torch.dtype
    """Of activations, and of weights that are not quantized."""
    tied_to: LinearMethod | None = None
    """The method of the embedding whose weight a language-modeling head shares."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the share: outputs, inputs."""
        return sum(part.size for part in self.outputs), self.inputs.size

    def loader(self, *, pack: int = 1, group: int = 1) -> ShardLoader:
        """Fills a parameter [outputs, inputs / pack / group]: elements that hold `pack` inputs each, or are for a `group` of them.

        Raises ConfigError where this rank's inputs cut through an element.
        """
        inputs = self.inputs.stored(f"inputs of {self.prefix}", pack=pack, group=group)
        return ShardLoader(self.outputs) if inputs.size == inputs.full else ShardLoader((inputs,), dim=1)


class LinearMethod(ABC):
    """Holds the weight W of one layer, and multiplies with it."""

    @abstractmethod
    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        """Gives `layer` its parameters: uninitialized, on the default device, each with a `weight_loader`. Biases are the layer's matter.

        Raises ConfigError for shares that the method cannot hold.
        """

    def process(self, layer: nn.Module) -> None:  # noqa: B027 - there need be nothing to do
        """Rearranges the weights, once they are loaded. It is called once. By default they stay as they are."""

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias: [T, inputs] -> a new tensor [T, outputs], in the dtype of `x`."""

    def apply(self, x: Tensor, bias: Tensor | None, *, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        """activation(x W^T + bias) or x W^T + bias + residual: [T, inputs] -> [T, outputs]. A method that fuses them overrides it.

        `activation` is a name that `get_activation` knows.
        """
        assert activation is None or residual is None
        out = self.multiply(x, bias)
        if residual is not None:
            return out.add_(residual)
        return out if activation is None else get_activation(activation)(out)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of W: ids [T] (int64, below outputs) -> a new tensor [T, inputs], in the model's dtype. For embeddings."""
        raise NotImplementedError(f"{type(self).__name__} cannot look up embeddings")


class Quantization(ABC):
    """Chooses the linear methods of a model's layers. One is made for each model, while it is constructed."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.config: Mapping[str, Any] = vllm_config.hf_config.get("quantization_config") or {}
        """The checkpoint's `quantization_config`. Empty: its weights are floats."""

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        """Why it cannot run a checkpoint, on the device that the config names; None when it can."""
        return None

    @abstractmethod
    def method(self, spec: LinearSpec) -> LinearMethod | None:
        """A new method for a layer. None: its weight is not quantized."""


_FUSED: Mapping[str | None, tuple[str, list[float], str]] = {
    None: ("none", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_python": ("gelu", [], "none"),
    "relu": ("relu", [], ""),
}
"""What oneDNN computes of an activation while a product's result is in registers."""


class UnquantizedMethod(LinearMethod):
    """A weight in the model's dtype. On the CPU it is repacked, once, into the blocks that oneDNN's kernels read.

    A plain weight is repacked at every call, or read with strides: decoding one token takes up to twice as long.
    """

    weight: nn.Parameter
    """As loaded. It is gone once it is packed, so that it is not held twice."""
    packed: Tensor | None = None

    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        self.is_embedding = spec.kind == "embedding"
        if spec.tied_to is None:
            self.weight = new_parameter(spec.shape, spec.dtype, spec.loader())
        elif isinstance(spec.tied_to, UnquantizedMethod):
            self.weight = spec.tied_to.weight
        else:
            raise UnsupportedError(f"{spec.prefix} shares its weight with the embedding, which {type(spec.tied_to).__name__} quantizes.")
        layer.weight = self.weight

    def process(self, layer: nn.Module) -> None:
        if not self.is_embedding and _can_pack(self.weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data)
            del self.weight, layer.weight

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, *_FUSED[None])
        return out

    def apply(self, x: Tensor, bias: Tensor | None, *, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        if self.packed is None or activation not in _FUSED:
            return super().apply(x, bias, activation=activation, residual=residual)
        if residual is None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, *_FUSED[activation])
        else:
            out = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, bias, "add")
        return out

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype is torch.float32:
        return True
    supported = {torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported, torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported}
    return weight.dtype in supported and bool(supported[weight.dtype]())


_local = threading.local()


@contextmanager
def linear_methods(quantization: Quantization | None) -> Iterator[None]:
    """Has layers that this thread makes inside ask `quantization` for their methods. Refuses to nest.

    It is to models what `torch.device` is: their constructors need not hand it from layer to layer.
    """
    assert not hasattr(_local, "quantization"), "a model is constructed inside the construction of another one"
    _local.quantization = quantization
    try:
        yield
    finally:
        del _local.quantization


def choose_method(spec: LinearSpec) -> LinearMethod:
    """The method of a layer: that of the quantization, inside `linear_methods`. Raises UnsupportedError for one that does not fit."""
    quantization: Quantization | None = getattr(_local, "quantization", None)
    method = quantization.method(spec) if quantization is not None else None
    if method is not None and spec.kind == "embedding" and type(method).embed is LinearMethod.embed:
        raise UnsupportedError(f"{type(method).__name__} cannot look up the embeddings of {spec.prefix}: it has no method embed.")
    return method or UnquantizedMethod()
