"""Kernels: the operations of layers. A layer names the operation, and the kernels of its model
compute it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model.linear_method import (
    Epilogue,
    LinearMethod,
    LinearSpec,
    Quantization,
    UnquantizedMethod,
)
from toolkit_lm.model.low_rank import LowRank
from toolkit_lm.model.quantized import DequantizingMethod, QuantizedWeight
from toolkit_lm.model.sources import Sources

if TYPE_CHECKING:
    from toolkit_lm.plugin import ModelRegistry

FusedLayer = Callable[..., tuple[Tensor, Any] | None]
"""(x [T, H], residual [T, H] or None, Rotation, and further inputs of the layer's kind) -> (x,
residual or None) after the layer. It may write to x and residual. None: the modules must compute
this step.

It is not called while a compiler traces the model.
"""

GroupedProduct = Callable[[Tensor, Tensor, Tensor | None, Epilogue], Tensor]
"""Product of rows with the weights of several experts: rows [R, inputs] in the order of experts,
ends [E] (int32) of each one's rows, biases [E, outputs] or None, an activation that follows, if any
-> [R, outputs]. Rows past the last end are undefined."""

RoutedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens x [T, H], the experts of each [T, K] (int64) and their weights [T, K] (float32) -> [T, H],
summed over the experts that are held, in float32."""

StateRows = tuple[Tensor, Tensor, Tensor]
"""R sequences that compute L tokens each in a step of recurrent layers: their tokens in the flat
batch [R, L], neighbours each, their blocks [R], and how many tokens each had computed before [R],
0: it has no state yet. All int64.

States are in rings [blocks, places, *shape], float32: those after token t of a sequence in place
t % places of its block.
"""


class Kernels:
    """The operations of layers, in plain torch, on any device. A subclass computes some of them in
    its own way, equal except for rounding.

    There is one instance per model, made before the model's layers. The result for a row of `x`
    depends on that row alone.
    """

    seams: ClassVar[frozenset[str]] = frozenset(
        {
            "refuses",
            "step",
            "linear_method",
            "quantized_method",
            "explain_quantized",
            "group",
            "experts",
            "linear",
            "layer_norm",
            "likeliest",
            "soft_cap",
            "causal_conv",
            "linear_attention",
            "selective_scan",
            "latent_attention",
        }
    )
    """Names that a subclass may override without a `fuse` of its own: fused layers do not compute
    them."""
    batch_invariant: ClassVar[bool] = False
    """A row's result has the same bits whatever the other rows are, and how many."""

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        """Returns why it cannot compute a model, on the device and in the dtype that the config
        names; None: it can."""
        return None

    def __init__(self, vllm_config: VllmConfig | None = None) -> None:
        """`vllm_config`: the model's, resolved; None outside an engine."""

    def step(self, num_tokens: int) -> AbstractContextManager[None]:
        """Context of a step of this many tokens, in the thread that computes it."""
        return nullcontext()

    def linear_method(self, spec: LinearSpec) -> LinearMethod:
        """A new method for a layer whose weight is not quantized: an UnquantizedMethod, or one that
        stores the weight in another order."""
        return UnquantizedMethod()

    def quantized_method(self, spec: LinearSpec, weight: QuantizedWeight) -> LinearMethod:
        """A new method that holds a quantized weight, ready to multiply. Its `create` and `process`
        are not called. For a tied head, `spec.tied_to` is the embedding's method, if made."""
        tied = spec.tied_to
        if isinstance(tied, DequantizingMethod):
            return tied
        return DequantizingMethod(weight, spec.dtype)

    def explain_quantized(self, spec: LinearSpec, weight: QuantizedWeight) -> str:
        """The product with a quantized weight in words, and why none is faster. The weight's
        tensors may be on the meta device."""
        return "torch, which dequantizes it at each product"

    def group(self, methods: Sequence[LinearMethod]) -> GroupedProduct | None:
        """Makes one product of several experts' methods, once their weights are loaded. None: each
        multiplies its own rows."""
        return None

    def experts(
        self,
        gate_up: Sequence[LinearMethod],
        down: Sequence[LinearMethod],
        biases: tuple[Tensor | None, Tensor | None],
        epilogue: Epilogue,
        first: int,
    ) -> RoutedProduct | None:
        """Makes the whole of the experts held, numbers `first` and on, once their weights are
        loaded: `gate_up`, the epilogue, `down`, with biases [E, outputs] of each. None: the caller
        brings each one's rows together, for `group`."""
        return None

    def fuse(self, parts: Any) -> FusedLayer | None:
        """Makes a function that computes a layer of these LayerParts in one call, once its weights
        are loaded. None: the layer's modules compute it."""
        return None

    def low_rank(self) -> LowRank | None:
        """Makes what adds adapters to the products of this model's layers. None: there is none."""
        return None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias, for a constant weight [outputs, inputs] without a linear method: x [R,
        inputs] -> [R, outputs]."""
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
        """Rotates heads x [T, heads, head_size] in place: x cos + (x with the dimensions of each
        pair swapped) sin (Su et al. 2021).

        cos and sin [T, 1, rotated dimensions]: sin is negative where the other dimension is
        subtracted. Pairs are neighbouring dimensions if `interleaved`, otherwise i and i + half.
        Dimensions beyond the rotated ones are unchanged.
        """
        size = cos.shape[-1]
        rotated = x if size == x.shape[-1] else x[..., :size]
        if interleaved:
            swapped = rotated.view(*rotated.shape[:-1], size // 2, 2).flip(-1).view(rotated.shape)
        else:
            swapped = rotated.roll(size // 2, -1)
        rotated.mul_(cos).addcmul_(swapped, sin)
        return x

    def likeliest(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The greatest value of each row [R, V] (NaN if there is any) and its index, the first of
        equals (int64): [R] each."""
        return torch.max(scores, dim=-1)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) (Bello et al. 2016), of logits [R, V], which may be written to."""
        return cap * torch.tanh(x / cap)

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        ring: Tensor,
        rows: StateRows,
    ) -> Tensor | None:
        """Causal depthwise convolution of the tokens of `rows`, then an activation: x [T,
        channels], weight [channels, 1, size] -> [R, L, channels] in float32. None: it is left to
        the caller, and nothing has changed.

        `ring` has the last size - 1 inputs, [size - 1, channels].
        """
        return None

    def linear_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        factor: Tensor,
        eps: float | None,
        ring: Tensor,
        rows: StateRows,
        out: Tensor,
    ) -> bool:
        """Linear attention of the tokens of `rows`, with a decaying state S [dk, dv] per head: q, k
        [R, L, groups, dk], v [R, L, heads, dv], decay and factor [T, heads] -> q S, to `out` [T,
        heads, dv]. Everything is float32. False: it is left to the caller.

        S becomes decay S + k factor v. With `eps` it becomes decay S + k factor (v - k decay S),
        the gated delta rule (Yang et al. 2024), with q dk**-0.5 and k of unit length first, where
        `eps` is added to the squares. Heads share the q and k of their group. A decay [T, heads,
        dk] is one for each line of S (Kimi Team 2025).
        """
        return False

    def selective_scan(
        self,
        x: Tensor,
        time: Tensor,
        rates: Tensor,
        into: Tensor,
        out_of: Tensor,
        ring: Tensor,
        rows: StateRows,
        out: Tensor,
    ) -> bool:
        """Selective scan of the tokens of `rows` (Gu and Dao 2023), with a state S [N, C]: x and
        time [T, C], rates [N, C], into and out_of [T, N] -> out_of S, to `out` [T, C]. Everything
        is float32. False: it is left to the caller.

        S becomes exp(time rates) S + into x.
        """
        return False

    def latent_attention(
        self, q: Tensor, latents: Tensor, places: Tensor, lengths: Tensor, scale: float, out: Tensor
    ) -> bool:
        """Attention of one token per row over the latents [N, size] at the row's first `lengths`
        [R] of `places` [R, K], int64: q [R, heads, size] -> to `out` [R, heads, rank], both
        float32. The first `rank` dimensions of a latent are its value. False: it is left to the
        caller."""
        return False


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
    """Context for constructing a model in this thread: layers get their methods from
    `quantization`, and compute with `kernels`. Refuses to nest.

    `make_part` looks up the classes of models within the model in `models`. `sources` has the
    checkpoint's names of layers.

    It works as `torch.device` does: constructors need not pass these from layer to layer.
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
    """Kernels for a layer under construction: those of `construction`, otherwise plain torch."""
    kernels: Kernels = getattr(_local, "made_with", _OUTSIDE)[1]
    return kernels


def choose_sources() -> Sources:
    """Checkpoint names for the layers of the model under construction. Empty outside
    `construction`."""
    return getattr(_local, "made_with", _OUTSIDE)[3] or Sources()


def choose_models() -> ModelRegistry:
    """Registry with the classes of models within the model under construction. Only inside
    `construction` of an engine's model."""
    models: ModelRegistry | None = getattr(_local, "made_with", _OUTSIDE)[2]
    assert models is not None, (
        "a model with models in it is made outside of construction(models=...)"
    )
    return models


def choose_method(spec: LinearSpec) -> LinearMethod:
    """The linear method of a layer: that of `construction`'s quantization, or of its kernels.
    Raises UnsupportedError."""
    return method_chooser()(spec)


def method_chooser() -> Callable[[LinearSpec], LinearMethod]:
    """Returns `choose_method` in its present state, for a layer that may need another method after
    the model is constructed."""
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
