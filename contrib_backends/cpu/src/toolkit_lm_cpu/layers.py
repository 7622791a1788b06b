"""CpuKernels: the kernels of linear layers, norms and other layers on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    NO_EPILOGUE,
    Epilogue,
    FusedLayer,
    GroupedProduct,
    Kernels,
    LayerParts,
    LinearMethod,
    LinearSpec,
    LowRank,
    QuantizedWeight,
    RoutedProduct,
    Rows,
    StateRows,
    UnquantizedMethod,
)
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from toolkit_lm_cpu.adapters import CpuLowRank
from toolkit_lm_cpu.arena import Arena
from toolkit_lm_cpu.float8 import panels_of
from toolkit_lm_cpu.fused import FusedDecoderLayer, Workspace, fits
from toolkit_lm_cpu.grouped import GroupedPanels, PanelExperts
from toolkit_lm_cpu.library import (
    _kernels,
    bind_threads,
    on_core,
    product_type,
    usable_types,
    use_threads,
)
from toolkit_lm_cpu.panels import LANES, PanelEmbedding, PanelLinear, linear, pack
from toolkit_lm_cpu.quantized import QuantizedPanels, explain, refusal
from toolkit_lm_cpu.states import (
    Convolutions,
    latent_attention,
    linear_attention,
    selective_scan,
)

_FUSED: Mapping[str | None, tuple[str, list[float], str]] = {
    None: ("none", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_python": ("gelu", [], "none"),
    "relu": ("relu", [], ""),
}
"""Activations that oneDNN can fuse into a matrix product, with its arguments for each."""
_SHORT = 256
"""Most tokens of a step whose torch operators run in one thread."""
_LARGE = 2**26
"""Bytes of weights from which on steps are long enough to be bound to cores."""


class OneDnnLinear(UnquantizedMethod):
    """A linear layer whose weight is repacked once into oneDNN's blocked layout.

    A plain weight is repacked at each call, or read with strides. Decoding one token then takes up
    to twice as long.
    """

    packed: Tensor | None = None

    def process(self, layer: nn.Module) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data)
        del self.weight, layer.weight

    def dequantized(self) -> Tensor:
        return super().dequantized() if self.packed is None else self.packed.to_dense()

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.packed is None:
            return super().multiply(x, bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, *_FUSED[None])
        return out

    def apply(
        self,
        x: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue = NO_EPILOGUE,
        *,
        rows: Rows | Tensor = Rows.FLAT,
    ) -> Tensor:
        activation, gated, residual = epilogue
        if self.packed is None or gated or activation not in _FUSED:
            return super().apply(x, bias, epilogue)
        if residual is None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.packed, bias, *_FUSED[activation]
            )
        else:
            out = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, bias, "add")
        return out


class CpuKernels(Kernels):
    """The kernels of this distribution if the CPU has AVX2, else torch with weights in oneDNN's
    layout."""

    batch_invariant = True

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        device = vllm_config.device.device
        return None if device == "cpu" else f"it has nothing for device {device}"

    def __init__(self, vllm_config: VllmConfig | None = None) -> None:
        super().__init__(vllm_config)
        self._arena = Arena()
        self._workspace = Workspace(self._arena)
        self._packed: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        self._convolve = Convolutions()
        self._types = usable_types()
        """Number of the kernels by dtype. Empty: torch computes everything."""
        self._core: int | None = None
        # Several threads that compute would meet on one core.
        self._may_bind = bool(self._types) and vllm_config is not None and _is_alone(vllm_config)
        if self._types:
            use_threads()

    def step(self, num_tokens: int) -> AbstractContextManager[None]:
        if self._may_bind:
            self._may_bind = False
            self._core = bind_threads() if self._arena.size >= _LARGE else None
        short = bool(self._types) and num_tokens <= _SHORT and torch.get_num_threads() > 1
        step = _one_torch_thread() if short else nullcontext()
        return step if self._core is None else _bound(step, self._core)

    def linear_method(self, spec: LinearSpec) -> LinearMethod:
        takes = (
            spec.dtype in self._types
            and spec.shape[1] % (LANES if spec.dtype is torch.float16 else 2) == 0
        )
        if spec.kind == "embedding":
            return PanelEmbedding() if takes else UnquantizedMethod()
        if takes:
            return PanelLinear(self._arena)
        return OneDnnLinear() if _has_onednn(spec.dtype) else UnquantizedMethod()

    def quantized_method(self, spec: LinearSpec, weight: QuantizedWeight) -> LinearMethod:
        if isinstance(spec.tied_to, QuantizedPanels):
            return spec.tied_to
        if refusal(weight, spec) is not None:
            return super().quantized_method(spec, weight)
        return panels_of(weight, spec, self._arena)

    def explain_quantized(self, spec: LinearSpec, weight: QuantizedWeight) -> str:
        why_not = refusal(weight, spec)
        if why_not is not None:
            return f"{super().explain_quantized(spec, weight)}: {why_not}"
        return explain(weight)

    def group(self, methods: Sequence[LinearMethod]) -> GroupedProduct | None:
        return GroupedPanels.of(methods)

    def experts(
        self,
        gate_up: Sequence[LinearMethod],
        down: Sequence[LinearMethod],
        biases: tuple[Tensor | None, Tensor | None],
        epilogue: Epilogue,
        first: int,
    ) -> RoutedProduct | None:
        return PanelExperts.of(gate_up, down, biases, epilogue, first)

    def low_rank(self) -> LowRank | None:
        return CpuLowRank() if self._types else None

    def fuse(self, parts: LayerParts) -> FusedLayer | None:
        return FusedDecoderLayer(parts, self._workspace) if fits(parts) else None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computes x W^T + bias. Packs the weight at its first use."""
        outputs, inputs = weight.shape
        is_plain = (
            x.dtype is weight.dtype is torch.float32 and x.dim() == 2 and weight.is_contiguous()
        )
        if not (self._types and is_plain and inputs % 2 == 0) or torch.compiler.is_compiling():
            return super().linear(x, weight, bias)
        packed = self._packed.get(weight)
        if packed is None:
            packed = self._packed[weight] = pack(
                weight, product_type(weight.dtype, inputs), self._arena
            )
        return linear(product_type(weight.dtype, inputs), x, packed, outputs, bias, 0, False, None)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not self._takes(x, weight):
            return super().rms_norm(x, weight, eps)
        return _norm(self._types[x.dtype], x, weight, None, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not (self._takes(x, weight) and x.dim() == 2 and residual.stride(1) == 1):
            return super().add_rms_norm(x, residual, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype)
        total = torch.empty(x.shape, dtype=x.dtype)
        _kernels.norm(
            self._types[x.dtype],
            x=x.data_ptr(),
            residual=residual.data_ptr(),
            sum=total.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            head_stride=0,
            residual_stride=residual.stride(0),
            tokens=x.shape[0],
            heads=1,
            size=x.shape[1],
            weight=weight.data_ptr(),
            bias=0,
            eps=eps,
            is_wide=weight.dtype is not x.dtype,
        )
        return out, total

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
    ) -> Tensor:
        if (
            weight is None
            or bias is None
            or not (self._takes(x, weight) and weight.dtype is bias.dtype is x.dtype)
        ):
            return super().layer_norm(x, weight, bias, shape, eps)
        return _norm(self._types[x.dtype], x, weight, bias, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        size = cos.shape[-1]
        fits = (
            not interleaved
            and size % 2 == 0
            and cos.dtype is x.dtype
            and cos.stride() == sin.stride()
        )
        if (
            not (fits and x.dtype in self._types and x.stride(2) == cos.stride(2) == 1)
            or torch.compiler.is_compiling()
        ):
            return super().rotate(x, cos, sin, interleaved)
        _kernels.rotate(
            self._types[x.dtype],
            x=x.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            x_stride=x.stride(0),
            head_stride=x.stride(1),
            angle_stride=cos.stride(0),
            tokens=x.shape[0],
            heads=x.shape[1],
            size=size,
        )
        return x

    def likeliest(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if scores.dtype not in self._types or scores.stride(1) != 1:
            return super().likeliest(scores)
        best = scores.new_empty(len(scores))
        indices = torch.empty(len(scores), dtype=torch.int64)
        _kernels.likeliest(
            self._types[scores.dtype],
            len(scores),
            scores=scores.data_ptr(),
            best=best.data_ptr(),
            indices=indices.data_ptr(),
            stride=scores.stride(0),
            size=scores.shape[1],
        )
        return best, indices

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        fits = x.dtype in self._types and x.device.type == "cpu" and x.stride(-1) == 1
        if not fits or x.dim() != 2 or torch.compiler.is_compiling():
            return super().soft_cap(x, cap)
        _kernels.soft_cap(
            self._types[x.dtype],
            len(x),
            x=x.data_ptr(),
            stride=x.stride(0),
            size=x.shape[1],
            cap=cap,
        )
        return x

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        ring: Tensor,
        rows: StateRows,
    ) -> Tensor | None:
        return self._convolve(x, weight, bias, activation, ring, rows)

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
        return linear_attention(q, k, v, decay, factor, eps, ring, rows, out)

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
        return selective_scan(x, time, rates, into, out_of, ring, rows, out)

    def latent_attention(
        self, q: Tensor, latents: Tensor, places: Tensor, lengths: Tensor, scale: float, out: Tensor
    ) -> bool:
        return latent_attention(q, latents, places, lengths, scale, out)

    def _takes(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the kernels can normalize x [tokens, N] or [tokens, heads, N]."""
        if torch.compiler.is_compiling() or x.dtype not in self._types or x.device.type != "cpu":
            return False
        wide = weight.dtype is torch.float32
        return (
            x.dim() in (2, 3)
            and x.stride(-1) == 1
            and x.shape[-1] % LANES == 0
            and (wide or weight.dtype is x.dtype)
            and weight.dim() == 1
        )


def _norm(type: int, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalizes rows [tokens, N] or [tokens, heads, N]. With a bias, their mean is subtracted
    first."""
    out = torch.empty(x.shape, dtype=x.dtype)
    has_heads = x.dim() == 3
    _kernels.norm(
        type,
        x=x.data_ptr(),
        residual=0,
        sum=0,
        out=out.data_ptr(),
        x_stride=x.stride(0),
        head_stride=x.stride(1) if has_heads else 0,
        residual_stride=0,
        tokens=x.shape[0],
        heads=x.shape[1] if has_heads else 1,
        size=x.shape[-1],
        weight=weight.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        eps=eps,
        is_wide=weight.dtype is not x.dtype,
    )
    return out


def _has_onednn(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.float32:
        return True
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype in supported and bool(supported[dtype]())


def _is_alone(vllm_config: VllmConfig) -> bool:
    """Whether one thread, the one that loads the model, computes all of it."""
    parallel = vllm_config.parallel
    return (
        not vllm_config.engine.overlap
        and parallel.tensor_parallel_size == parallel.pipeline_parallel_size == 1
    )


@contextmanager
def _bound(step: AbstractContextManager[None], core: int) -> Iterator[None]:
    with on_core(core), step:
        yield


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Context in which torch computes in the calling thread alone.

    Torch's other threads spin for milliseconds after their work, on cores that the kernels' threads
    need.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
