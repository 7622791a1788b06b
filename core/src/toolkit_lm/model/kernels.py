"""Kernels: what layers compute with. A layer names the operation; the kernels of its model compute
it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model.linear_method import LinearMethod, LinearSpec, Quantization, UnquantizedMethod
from toolkit_lm.model.sources import Sources

if TYPE_CHECKING:
    from toolkit_lm.plugin import ModelRegistry

FusedLayer = Callable[[Tensor, Tensor | None, Any], tuple[Tensor, Tensor] | None]
"""(x [T, H], residual [T, H] or None, Rotation) -> (x, residual) after the layer. It may write to
both. None: not in this step.

It is not called while a compiler traces the model.
"""


class Kernels:
    """The operations of layers, in plain torch, on any device. A subclass computes some of them in
    its own way, equal but for rounding.

    One is made for each model, before its layers. What each operation gives for a row of `x`
    depends on that row alone.
    """

    seams: ClassVar[frozenset[str]] = frozenset(
        {"refuses", "step", "linear_method", "linear", "layer_norm", "likeliest"}
    )
    """Names that a subclass may override without a `fuse` of its own: no fused layer computes
    them."""

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        """Why it cannot compute a model, on the device and in the dtype that the config names; None
        when it can."""
        return None

    def __init__(self, vllm_config: VllmConfig | None = None) -> None:
        """`vllm_config`: the model's, resolved; None outside an engine."""

    def step(self, num_tokens: int) -> AbstractContextManager[None]:
        """Entered by the thread that computes a step of so many tokens, for as long as it does."""
        return nullcontext()

    def linear_method(self, spec: LinearSpec) -> LinearMethod:
        """A new method for a layer whose weight is not quantized: an UnquantizedMethod, or one that
        holds the weight in another order."""
        return UnquantizedMethod()

    def fuse(self, parts: Any) -> FusedLayer | None:
        """What computes a layer of these LayerParts in one call, made once its weights are loaded.
        None: the layer's modules do."""
        return None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias, of a weight [outputs, inputs] that no linear method holds and nothing
        changes: x [R, inputs] -> [R, outputs]."""
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """weight * x / sqrt(mean(x²) + eps) over the last axis (Zhang and Sennrich 2019): x [...,
        N], weight [N] -> a new tensor as x.

        A weight in float32 is not rounded to the dtype of `x`.
        """
        if weight.dtype is x.dtype:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The `rms_norm` of x + residual, both [T, N], and that sum."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
    ) -> Tensor:
        """weight * (x - mean) / sqrt(variance + eps) + bias over the last axes, of `shape` (Ba et
        al. 2016): a new tensor as x."""
        return F.layer_norm(x, shape, weight, bias, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """Heads x [T, heads, head_size], turned in place: x cos + (x with the dimensions of each
        pair swapped) sin (Su et al. 2021).

        cos and sin [T, 1, rotated dimensions]: sin is negative where the other dimension is
        subtracted. Pairs are neighbouring dimensions where they are `interleaved`, else i and i +
        half. Dimensions past the rotated ones stay.
        """
        size = cos.shape[-1]
        rotated = x if size == x.shape[-1] else x[..., :size]
        if interleaved:
            swapped = rotated.reshape(*rotated.shape[:-1], size // 2, 2).flip(-1).flatten(-2)
        else:
            swapped = rotated.roll(size // 2, -1)
        rotated.mul_(cos).addcmul_(swapped, sin)
        return x

    def likeliest(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The greatest of each row [R, V], NaN where there is any, and where it is, the first of
        equals (int64): [R] each."""
        return torch.max(scores, dim=-1)


PLAIN = Kernels()
_OUTSIDE = None, PLAIN, None, None
_local = threading.local()


@contextmanager
def construction(
    *,
    quantization: Quantization | None = None,
    kernels: Kernels = PLAIN,
    models: ModelRegistry | None = None,
    sources: Sources | None = None,
) -> Iterator[None]:
    """Has layers that this thread makes inside ask these for their methods, and compute with these
    kernels. Refuses to nest.

    `make_part` finds the classes of models within the model in `models`. `sources` has the
    checkpoint's names of layers.

    It is to models what `torch.device` is: their constructors need not hand it from layer to layer.
    """
    assert not hasattr(_local, "made_with"), (
        "a model is constructed inside the construction of another one"
    )
    if quantization is not None:
        quantization.kernels = kernels
    _local.made_with = quantization, kernels, models, sources or Sources()
    try:
        yield
    finally:
        del _local.made_with


def choose_kernels() -> Kernels:
    """What a layer that is being made computes with: inside `construction` its kernels, else plain
    torch."""
    kernels: Kernels = getattr(_local, "made_with", _OUTSIDE)[1]
    return kernels


def choose_sources() -> Sources:
    """The checkpoint's names of the layers of the model that is being made; outside of
    `construction` no names are known."""
    return getattr(_local, "made_with", _OUTSIDE)[3] or Sources()


def choose_models() -> ModelRegistry:
    """Where the classes of models within the one that is being made are found: inside
    `construction` of an engine's model."""
    models: ModelRegistry | None = getattr(_local, "made_with", _OUTSIDE)[2]
    assert models is not None, (
        "a model with models in it is made outside of construction(models=...)"
    )
    return models


def choose_method(spec: LinearSpec) -> LinearMethod:
    """The linear method of a layer: inside `construction` that of its quantization, or of its
    kernels. Raises UnsupportedError."""
    return method_chooser()(spec)


def method_chooser() -> Callable[[LinearSpec], LinearMethod]:
    """`choose_method` as it is now, for a layer that may have to ask again when its model has been
    made."""
    quantization, kernels, *_ = getattr(_local, "made_with", _OUTSIDE)
    return partial(_choose, quantization, kernels)


def _choose(quantization: Quantization | None, kernels: Kernels, spec: LinearSpec) -> LinearMethod:
    method = quantization.method(spec) if quantization is not None else None
    if method is not None and spec.kind == "embedding" and type(method).embed is LinearMethod.embed:
        raise UnsupportedError(
            f"{type(method).__name__} cannot look up the embeddings of {spec.prefix}: it has no "
            "method embed."
        )
    if quantization is not None:
        return method or quantization.plain(spec)
    return kernels.linear_method(spec)
