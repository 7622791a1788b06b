"""TritonKernels: the kernels of norms, rotations and gates on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    FusedLayer,
    GroupedProduct,
    Kernels,
    LayerParts,
    LinearMethod,
    LinearSpec,
    LowRank,
    QuantizedWeight,
    StateRows,
    UnquantizedMethod,
)
from torch import Tensor, nn

from toolkit_lm_triton.device import LAUNCH, interprets, refusal
from toolkit_lm_triton.fused import FusedDecoderLayer, fits
from toolkit_lm_triton.gated import GatedMethod
from toolkit_lm_triton.grouped import GroupedProducts
from toolkit_lm_triton.low_rank import TritonLowRank
from toolkit_lm_triton.pieces import power_of_2
from toolkit_lm_triton.quantized import QuantizedMethod, QuantizedProduct, ScaledProduct, is_scaled
from toolkit_lm_triton.states import States

GATES: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""The activations of the kernels `gate` and `convolve`, by the names of checkpoints."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_SIZE = 2**15
"""Largest row that is normalized: a program holds it whole."""
_BLOCK = 1024
_SCORES = 4096
"""Scores that a program of `likeliest` reads."""


class GatedLinear(GatedMethod, UnquantizedMethod):
    """A linear method with the weight as it was loaded."""

    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        super().create(layer, spec)
        self.dtype = spec.dtype

    @property
    def stored(self) -> Tensor:
        return self.weight


class TritonKernels(Kernels):
    """Norms with their residuals, rotations, gates and greedy tokens in one kernel each. Products
    are torch's, but for those of quantized weights."""

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        return refusal(vllm_config.device.device, vllm_config.model.dtype)

    def __init__(self, vllm_config: VllmConfig | None = None) -> None:
        super().__init__(vllm_config)
        from toolkit_lm_triton.kernels import layers

        self._kernels: ModuleType = layers
        self._device = "cpu" if interprets() else "cuda"
        self._states = States(self._device)

    def runs(self, x: Tensor) -> bool:
        """Whether the kernels can compute with it. To a compiler, plain torch says more than a
        kernel does."""
        return (
            x.dtype in _DTYPES
            and x.device.type == self._device
            and not torch.compiler.is_compiling()
        )

    def linear_method(self, spec: LinearSpec) -> LinearMethod:
        return GatedLinear(self) if spec.kind == "linear" else UnquantizedMethod()

    def quantized_method(self, spec: LinearSpec, weight: QuantizedWeight) -> LinearMethod:
        if isinstance(spec.tied_to, QuantizedMethod):
            return spec.tied_to
        if spec.dtype not in _DTYPES or weight.codes.device.type != self._device:
            return super().quantized_method(spec, weight)
        method = ScaledProduct if is_scaled(weight, spec) else QuantizedProduct
        return method(weight, spec, self)

    def group(self, methods: Sequence[LinearMethod]) -> GroupedProduct | None:
        return GroupedProducts.of(methods)

    def low_rank(self) -> LowRank:
        return TritonLowRank(self._device)

    def fuse(self, parts: LayerParts) -> FusedLayer | None:
        return FusedDecoderLayer(parts, self._kernels) if fits(parts) else None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not self._norms(x, weight):
            return super().rms_norm(x, weight, eps)
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not (
            self._norms(x, weight)
            and x.dim() == 2
            and residual.dtype is x.dtype
            and residual.stride(1) == 1
        ):
            return super().add_rms_norm(x, residual, weight, eps)
        return self._norm(x, residual, weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        size = cos.shape[-1]
        if (
            not self.runs(x)
            or size % 2
            or x.stride(2) != 1
            or cos.stride() != sin.stride()
            or cos.stride(2) != 1
        ):
            return super().rotate(x, cos, sin, interleaved)
        if x.numel():
            self._kernels.rotate[x.shape[:2]](
                *(x, cos, sin, x.stride(0), x.stride(1), cos.stride(0)),
                HALF=size // 2,
                HALF_FILLED=power_of_2(size // 2),
                INTERLEAVED=interleaved,
                num_warps=1,
                **LAUNCH,
            )
        return x

    def likeliest(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The greatest score and its index in each row. A first kernel reduces parts of the rows, a
        second one their results."""
        if not self.runs(scores) or scores.stride(1) != 1 or not len(scores):
            return super().likeliest(scores)
        best = scores
        places = None
        while places is None or best.shape[1] > 1:
            num_parts = -(-best.shape[1] // _SCORES)
            parts = (
                scores.new_empty(len(scores), num_parts),
                scores.new_empty(len(scores), num_parts, dtype=torch.int64),
            )
            block = min(_SCORES, power_of_2(best.shape[1]))
            self._kernels.likeliest[len(scores), num_parts](
                *(best, places, *parts, best.stride(0), best.shape[1]),
                BLOCK=block,
                HAS_PLACES=places is not None,
                **LAUNCH,
            )
            best, places = parts
        return best[:, 0], places[:, 0]

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        ring: Tensor,
        rows: StateRows,
    ) -> Tensor | None:
        if not self.runs(x) or not (activation is None or activation in GATES):
            return None
        name = "" if activation is None else GATES[activation]
        return self._states.causal_conv(x, weight, bias, name, ring, rows)

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
        return self._states.linear_attention(q, k, v, decay, factor, eps, ring, rows, out)

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
        return self._states.selective_scan(x, time, rates, into, out_of, ring, rows, out)

    def has_gate(self, activation: str, x: Tensor) -> bool:
        """Whether `gate` computes that activation of a product of x."""
        return activation in GATES and self.runs(x)

    def gate(self, x: Tensor, activation: str) -> Tensor:
        """[gate, up] side by side [T, 2 * size], with rows' elements side by side ->
        activation(gate) * up [T, size]; one of GATES."""
        size = x.shape[1] // 2
        out = x.new_empty(len(x), size)
        if out.numel():
            block = min(_BLOCK, power_of_2(size))
            self._kernels.gate[len(x), -(-size // block)](
                *(x, out, x.stride(0)),
                SIZE=size,
                BLOCK=block,
                ACTIVATION=GATES[activation],
                **LAUNCH,
            )
        return out

    def _norms(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the kernels can norm x [tokens, N] or [tokens, heads, N]."""
        return (
            self.runs(x)
            and x.dim() in (2, 3)
            and x.stride(-1) == 1
            and x.shape[-1] <= _MOST_SIZE
            and weight.dim() == 1
        )

    def _norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum. Without a residual the sum is x."""
        size = x.shape[-1]
        heads = 1 if x.dim() == 2 else x.shape[1]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = x if residual is None else torch.empty_like(out)
        if out.numel():
            self._kernels.rms_norm[len(x) * heads,](
                *(x, residual, weight, total, out, x.stride(0), x.stride(1) if x.dim() == 3 else 0),
                *(0 if residual is None else residual.stride(0), heads, eps),
                SIZE=size,
                SIZE_FILLED=power_of_2(size),
                ADDS=residual is not None,
                **LAUNCH,
            )
        return out, total
