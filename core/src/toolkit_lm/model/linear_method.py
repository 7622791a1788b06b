"""Linear methods: how layers store their weights, and multiply by them. Each layer asks for its own
method, by kind and name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.kv import KVCacheSpec
from toolkit_lm.model.activation import gate, get_activation
from toolkit_lm.model.parameters import Shard, ShardLoader, new_parameter

LayerKind = Literal["linear", "embedding", "lm_head", "experts"]


class Rows(Enum):
    """Rows that a linear layer gets. An expert's layers get indices [rows] (int64) into the step's
    flat tokens instead."""

    FLAT = "flat"
    """All T tokens of the step, in their order."""
    SAMPLED = "sampled"
    """The last token of each row that samples, in the order of rows."""
    ENCODER = "encoder"
    """Tokens of an encoder: of its sequences, or of a multimodal item."""
    CACHED = "cached"
    """Cached states of tokens, of this step and of earlier ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """Requirements of a layer on its method: to store this rank's share of a weight W [outputs,
    inputs]. At most one axis is sharded."""

    kind: LayerKind
    """Kind of layer. "experts": a projection of one of several experts."""
    prefix: str
    """The layer's name: "model.layers.0.self_attn.qkv_proj"."""
    inputs: Shard
    outputs: tuple[Shard, ...]
    """Shares of the outputs, concatenated. A layer that packs several of the checkpoint's weights
    has one for each."""
    dtype: torch.dtype
    """Dtype of activations, and of weights that are not quantized."""
    sources: tuple[str, ...] = ()
    """The checkpoint's names of the modules whose weights the layer holds: one for each of
    `outputs`, or one for all of them. Example: "model.layers.0.self_attn.q_proj", "...k_proj",
    "...v_proj". The layer fills it in."""
    tensors: tuple[frozenset[str], ...] = ()
    """Names of the checkpoint's tensors of each of `sources`, without the source's name: "weight",
    "weight_scale". Empty: unknown. The layer fills it in."""
    tied_to: LinearMethod | None = None
    """The method of the embedding whose weight a language-modeling head shares."""

    @property
    def shape(self) -> tuple[int, int]:
        """Size of this rank's share: outputs, inputs."""
        return sum(shard.size for shard in self.outputs), self.inputs.size

    def loader(self, *, pack: int = 1, group: int = 1) -> ShardLoader:
        """Loader of a parameter [outputs, inputs / pack / group]. Its elements hold `pack` inputs
        each, or apply to a `group` of them.

        Raises ConfigError if this rank's inputs cut through an element.
        """
        inputs = self.inputs.stored(f"inputs of {self.prefix}", pack=pack, group=group)
        return (
            ShardLoader(self.outputs)
            if inputs.size == inputs.full
            else ShardLoader((inputs,), dim=1)
        )


class Epilogue(NamedTuple):
    """An activation or a residual that follows a layer's product, or neither."""

    activation: str | None = None
    """A name that `get_activation` accepts."""
    gated: bool = False
    """The first half of the outputs passes the activation, and is multiplied by the second: [T,
    outputs] -> [T, outputs / 2]."""
    residual: Tensor | None = None
    """[T, outputs], which is added."""

    def finish(self, out: Tensor) -> Tensor:
        """Applies this to a product [T, outputs], which may be written to."""
        activation, gated, residual = self
        assert activation is None or residual is None
        if residual is not None:
            return out.add_(residual)
        if activation is None:
            return out
        return gate(out, activation) if gated else get_activation(activation)(out)


NO_EPILOGUE = Epilogue()
"""Nothing follows the product."""


class LinearMethod(ABC):
    """Stores the weight W of one layer, and multiplies by it."""

    @abstractmethod
    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        """Gives `layer` its parameters: uninitialized, on the default device, each with a
        `weight_loader`. The layer itself creates biases.

        Raises ConfigError for shares that the method cannot store.
        """

    def process(self, layer: nn.Module) -> None:  # noqa: B027 - there need be nothing to do
        """Rearranges the weights after loading. Called once. By default they stay as they are.

        The method owns the weights from then on. Nothing else may read their memory.
        """

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias: [T, inputs] -> a new tensor [T, outputs], in the dtype of `x`."""

    def dequantized(self) -> Tensor:
        """This rank's share of W: [outputs, inputs], in a floating dtype. It may be computed anew
        at each call, so steps should not call it."""
        raise NotImplementedError(f"{type(self).__name__} cannot show its weight")

    def likeliest(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Like `Kernels.likeliest` of the result of `multiply`, bit-identical, without computing
        that result. None: it must be computed."""
        return None

    def apply(
        self,
        x: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue = NO_EPILOGUE,
        *,
        rows: Rows | Tensor = Rows.FLAT,
    ) -> Tensor:
        """activation(x W^T + bias) or x W^T + bias + residual: [T, inputs] -> [T, outputs], half as
        many if the epilogue is gated. A method that fuses the epilogue overrides it.

        `rows`: the rows of `x`, for a method that treats them differently.
        """
        out = self.multiply(x, bias)
        return out if epilogue is NO_EPILOGUE else epilogue.finish(out)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of W: ids [T] (int64, below outputs) -> a new tensor [T, inputs], in the model's
        dtype. For embeddings."""
        raise NotImplementedError(f"{type(self).__name__} cannot look up embeddings")


class WrappingMethod(LinearMethod):
    """Base of methods that compute with another one, quantized or not, and say in `apply` how: for
    instance an adapter's.

    `LinearBase.wrap` wraps the layer's present method, whose weight is loaded and rearranged by
    then. A later wrapper wraps an earlier one, and changes its result.
    """

    def __init__(self, inner: LinearMethod) -> None:
        self.inner = inner

    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        self.inner.create(layer, spec)

    def process(self, layer: nn.Module) -> None:
        self.inner.process(layer)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.apply(x, bias)

    @abstractmethod
    def apply(
        self,
        x: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue = NO_EPILOGUE,
        *,
        rows: Rows | Tensor = Rows.FLAT,
    ) -> Tensor: ...


class ChangingMethod(WrappingMethod):
    """Base of methods that change another one's result by rows."""

    @abstractmethod
    def change(self, x: Tensor, out: Tensor, rows: Rows | Tensor) -> Tensor:
        """Returns the changed `out` [T, outputs], which is x W^T + bias and may be written to.
        Called before the activation and the residual."""

    def apply(
        self,
        x: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue = NO_EPILOGUE,
        *,
        rows: Rows | Tensor = Rows.FLAT,
    ) -> Tensor:
        out = self.change(x, self.inner.apply(x, bias, rows=rows), rows)
        return out if epilogue is NO_EPILOGUE else epilogue.finish(out)


class Quantization(ABC):
    """Chooses the linear methods of a model's layers. There is one per model, made during its
    construction."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.config: Mapping[str, Any] = vllm_config.hf_config.get("quantization_config") or {}
        """The checkpoint's `quantization_config`. Empty: its weights are floats."""
        self.kernels: Any = None
        """The model's Kernels, set when its construction begins."""

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        """Returns why it cannot run a checkpoint, on the device that the config names; None: it
        can."""
        return None

    @abstractmethod
    def method(self, spec: LinearSpec) -> LinearMethod | None:
        """A new method for a layer. None: its weight is not quantized, and `plain` stores it."""

    def adapt(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The checkpoint's tensors, some of them renamed, changed or left out, as the parameters of
        this quantization's methods take them. Raises CheckpointError."""
        return weights

    def kv_cache(self, spec: KVCacheSpec, prefix: str) -> KVCacheSpec:
        """The spec of what the layer `prefix` keeps, which by itself it would keep as `spec`: with
        another dtype, with the checkpoint's `scales`, or of a plugin's own kind.

        It is asked once for each layer with a cache, when the model is constructed. A layer that
        shares another one's cache is asked about under that one's name.
        """
        return spec

    def plain(self, spec: LinearSpec) -> LinearMethod:
        """A new method of the model's kernels, for a weight that is not quantized. A method that
        wraps another one starts from it."""
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
