"""The product with a weight, which is nearly all that a model computes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Projection(nn.Module):
    """Base of layers with a `weight` [output, input]. On the CPU it is repacked, once, into the blocks that oneDNN's kernels read.

    A plain weight is repacked at every call, or read with strides: decoding one token takes up to twice as long.
    """

    weight: nn.Parameter
    """As loaded. It is gone once it is packed, so that it is not held twice."""
    packed: Tensor | None = None

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias: [T, input] -> [T, output]."""
        if self.packed is None:
            return F.linear(x, self.weight, bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return out

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
