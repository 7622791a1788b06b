"""Linear methods: how layers hold their weights, and multiply with them. Each layer asks for a
method of its own, by kind and name."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model.activation import gate, get_activation
from toolkit_lm.model.parameters import Part, ShardLoader, new_parameter

LayerKind = Literal["linear", "embedding", "lm_head", "experts"]


class Rows(Enum):
    """Which rows a linear layer is given. An expert's layers are given other ones: indices [rows]
    (int64) into the step's flat tokens."""

    FLAT = "flat"
    """All T tokens of the step, in their order."""
    SAMPLED = "sampled"
    """The last token of each row that draws one, in the order of rows."""
    ENCODER = "encoder"
    """Tokens of an encoder: its sequences' or an item's of media."""


_local = threading.local()


@contextmanager
def logits_of_tokens(tokens: Tensor) -> Iterator[None]:
    """Has heads that this thread calls inside say that they are given these of the step's flat
    tokens, indices [R] (int64), and not the last of each row."""
    _local.tokens = tokens
    try:
        yield
    finally:
        del _local.tokens


def head_rows() -> Rows | Tensor:
    """What a language-modeling head is given now."""
    return getattr(_local, "tokens", Rows.SAMPLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """What a layer asks of its method: to hold this rank's share of a weight W [outputs, inputs].
    One axis at most is sharded."""

    kind: LayerKind
    """"experts": a projection of one of several experts."""
    prefix: str
    """The layer's name: "model.layers.0.self_attn.qkv_proj"."""
    inputs: Part
    outputs: tuple[Part, ...]
    """One after the other: of a layer that packs several of the checkpoint's weights, those of
    each."""
    dtype: torch.dtype
    """Of activations, and of weights that are not quantized."""
    sources: tuple[str, ...] = ()
    """The checkpoint's names of the modules whose weights the layer holds, one for each of
    `outputs`, or one of all: "model.layers.0.self_attn.q_proj", "...k_proj", "...v_proj". The layer
    fills it in."""
    tied_to: LinearMethod | None = None
    """The method of the embedding whose weight a language-modeling head shares."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the share: outputs, inputs."""
        return sum(part.size for part in self.outputs), self.inputs.size

    def loader(self, *, pack: int = 1, group: int = 1) -> ShardLoader:
        """Fills a parameter [outputs, inputs / pack / group]: elements that hold `pack` inputs
        each, or are for a `group` of them.

        Raises ConfigError where this rank's inputs cut through an element.
        """
        inputs = self.inputs.stored(f"inputs of {self.prefix}", pack=pack, group=group)
        return (
            ShardLoader(self.outputs)
            if inputs.size == inputs.full
            else ShardLoader((inputs,), dim=1)
        )


class LinearMethod(ABC):
    """Holds the weight W of one layer, and multiplies with it."""

    @abstractmethod
    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        """Gives `layer` its parameters: uninitialized, on the default device, each with a
        `weight_loader`. Biases are the layer's matter.

        Raises ConfigError for shares that the method cannot hold.
        """

    def process(self, layer: nn.Module) -> None:  # noqa: B027 - there need be nothing to do
        """Rearranges the weights, once they are loaded. It is called once. By default they stay as
        they are.

        The weights become the method's. Nothing else may read their memory afterwards.
        """

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias: [T, inputs] -> a new tensor [T, outputs], in the dtype of `x`."""

    def dequantized(self) -> Tensor:
        """W itself, this rank's share: [outputs, inputs], a floating dtype. It may be made anew at
        each call, so that no step should ask for it."""
        raise NotImplementedError(f"{type(self).__name__} cannot show its weight")

    def likeliest(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """As `Kernels.likeliest` of what `multiply` would give, bit for bit, without making it.
        None: it has to be made."""
        return None

    def apply(
        self,
        x: Tensor,
        bias: Tensor | None,
        *,
        rows: Rows | Tensor = Rows.FLAT,
        activation: str | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """activation(x W^T + bias) or x W^T + bias + residual: [T, inputs] -> [T, outputs]. A
        method that fuses them overrides it.

        `rows`: which the rows of `x` are, for a method that treats them differently.

        `activation` is a name that `get_activation` knows. `gated`: the first half of the outputs
        passes it, and is multiplied with the second: [T, outputs / 2].
        """
        return finish(self.multiply(x, bias), activation, gated, residual)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of W: ids [T] (int64, below outputs) -> a new tensor [T, inputs], in the model's
        dtype. For embeddings."""
        raise NotImplementedError(f"{type(self).__name__} cannot look up embeddings")


def finish(out: Tensor, activation: str | None, gated: bool, residual: Tensor | None) -> Tensor:
    """What `LinearMethod.apply` makes of a product [T, outputs], which it may write to."""
    assert activation is None or residual is None
    if residual is not None:
        return out.add_(residual)
    if activation is None:
        return out
    return gate(out, activation) if gated else get_activation(activation)(out)


class WrappingMethod(LinearMethod):
    """Base of methods that change what another one gives, quantized or not, by rows: an adapter's.

    `LinearBase.wrap` puts one around the method that the layer has. That one's weight is loaded
    and rearranged by then. A later one wraps an earlier one, and changes what that gives.
    """

    def __init__(self, inner: LinearMethod) -> None:
        self.inner = inner

    @abstractmethod
    def change(self, x: Tensor, out: Tensor, rows: Rows | Tensor) -> Tensor:
        """What becomes of `out` [T, outputs], x W^T + bias, which it may write to: before the
        activation, and before the residual is added."""

    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        self.inner.create(layer, spec)

    def process(self, layer: nn.Module) -> None:
        self.inner.process(layer)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.apply(x, bias)

    def apply(
        self,
        x: Tensor,
        bias: Tensor | None,
        *,
        rows: Rows | Tensor = Rows.FLAT,
        activation: str | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        out = self.change(x, self.inner.apply(x, bias, rows=rows), rows)
        return finish(out, activation, gated, residual)


class Quantization(ABC):
    """Chooses the linear methods of a model's layers. One is made for each model, while it is
    constructed."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.config: Mapping[str, Any] = vllm_config.hf_config.get("quantization_config") or {}
        """The checkpoint's `quantization_config`. Empty: its weights are floats."""
        self.kernels: Any = None
        """The model's Kernels, from when its construction begins."""

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        """Why it cannot run a checkpoint, on the device that the config names; None when it can."""
        return None

    @abstractmethod
    def method(self, spec: LinearSpec) -> LinearMethod | None:
        """A new method for a layer. None: its weight is not quantized, and `plain` holds it."""

    def plain(self, spec: LinearSpec) -> LinearMethod:
        """A new method of the model's kernels, for a weight that is not quantized: what a method
        that wraps another begins with."""
        method: LinearMethod = self.kernels.linear_method(spec)
        return method


class UnquantizedMethod(LinearMethod):
    """A weight in the model's dtype, as it was loaded."""

    weight: nn.Parameter

    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        if spec.tied_to is None:
            self.weight = new_parameter(spec.shape, spec.dtype, spec.loader())
        elif isinstance(spec.tied_to, UnquantizedMethod):
            self.weight = spec.tied_to.weight
        else:
            raise UnsupportedError(
                f"{spec.prefix} shares its weight with the embedding, which "
                f"{type(spec.tied_to).__name__} quantizes."
            )
        layer.weight = self.weight

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def dequantized(self) -> Tensor:
        return self.weight

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)
