"""The product with a weight, which is nearly all that a model computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm.model.activation import get_activation

_FUSED: Mapping[str | None, tuple[str, list[float], str]] = {
    None: ("none", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_python": ("gelu", [], "none"),
    "relu": ("relu", [], ""),
}
"""What oneDNN computes of an activation while a product's result is in registers."""


class Projection(nn.Module):
    """Base of layers with a `weight` [output, input]. On the CPU it is repacked, once, into the blocks that oneDNN's kernels read.

    A plain weight is repacked at every call, or read with strides: decoding one token takes up to twice as long.
    """

    weight: nn.Parameter
    """As loaded. It is gone once it is packed, so that it is not held twice."""
    packed: Tensor | None = None

    def project(self, x: Tensor, bias: Tensor | None, *, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        """activation(x W^T + bias) or x W^T + bias + residual: [T, input] -> [T, output]."""
        assert activation is None or residual is None
        out: Tensor
        if self.packed is not None:
            product = torch.ops.mkldnn._linear_pointwise
            if residual is not None:
                out = product.binary(x, residual, self.packed, bias, "add")
                return out
            if activation in _FUSED:
                out = product(x, self.packed, bias, *_FUSED[activation])
                return out
            out = product(x, self.packed, bias, *_FUSED[None])
        else:
            out = F.linear(x, self.weight, bias)
        if residual is not None:
            return out.add_(residual)
        return out if activation is None else get_activation(activation)(out)

    def process_weights_after_loading(self) -> None:
        if _can_pack(self.weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data)
            del self.weight


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype is torch.float32:
        return True
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return weight.dtype in supported and bool(supported[weight.dtype]())
