"""CpuBackend: attention without a cache, for sequences whose tokens all see each other."""

from __future__ import annotations

import torch
from toolkit_lm.attention import AttentionBackend, AttentionSpec, AttentionType, BatchView, KVCacheSpec, LayerParams, PageTensor
from torch import Tensor

try:
    # After torch: the kernels run in its threads.
    from toolkit_lm_cpu import _kernels
except ImportError as error:
    _missing: str | None = f"its kernels are not there ({error}): they are compiled when toolkit-lm-cpu is installed"
else:
    _missing = None

_LANES = 16


class CpuBackend(AttentionBackend):
    """Exact attention of encoders in float32 and bfloat16, in as many threads as torch has.

    Nothing is padded, and sequences need not be of one length. Scores and softmax are in float32.
    """

    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        if spec.device != "cpu":
            return f"no kernel for device {spec.device}"
        if spec.type is not AttentionType.ENCODER:
            return f"no kernel for {spec.type} layers, only for encoder layers"
        if _missing is not None:
            return _missing
        if spec.dtype not in ("float32", "bfloat16"):
            return f"no kernel for {spec.dtype}, only for float32, bfloat16"
        if not _kernels.supports(spec.dtype):
            return f"this processor lacks the AVX-512 instructions for {spec.dtype}"
        if spec.head_size % _LANES:
            return f"head_size {spec.head_size} is not a multiple of {_LANES}"
        asked = [name for name in ("window", "soft_cap", "sinks", "bias") if getattr(spec, name)]
        return f"no kernel with {' and '.join(asked)}" if asked else None

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> list[PageTensor]:
        raise NotImplementedError("encoder layers have no cache")

    def build(self, batch: BatchView) -> BatchView:
        return batch

    def write_kv(self, layer: LayerParams, k: Tensor, v: Tensor, kv_cache: tuple[Tensor, ...], meta: BatchView) -> None:
        raise NotImplementedError("encoder layers have no cache")

    def forward(
        self,
        layer: LayerParams,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        kv_cache: tuple[Tensor, ...] | None,
        meta: BatchView,
        out: Tensor,
    ) -> None:
        assert k is not None and v is not None
        q, k, v, to = (_side_by_side(x) for x in (q, k, v, out))
        starts = meta.query_start
        _kernels.attend(
            q.dtype is torch.bfloat16,
            (q.data_ptr(), k.data_ptr(), v.data_ptr(), to.data_ptr()),
            (q.stride(0), k.stride(0), v.stride(0), to.stride(0)),
            starts.ctypes.data,
            meta.seq_lens.ctypes.data,
            len(starts) - 1,
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_size,
            layer.scale,
        )
        if to is not out:
            out.copy_(to)


def _side_by_side(x: Tensor) -> Tensor:
    """x [T, heads, head_size] with a token's elements side by side, which they are as a model gives them."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
