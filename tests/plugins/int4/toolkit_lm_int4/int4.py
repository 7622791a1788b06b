"""Weights in int4: eight in an int32, with a scale and a zero for each group of 32 inputs. The
checkpoint holds them so."""

from __future__ import annotations

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.kv import KVCacheSpec
from toolkit_lm.model import LinearMethod, LinearSpec, Quantization, new_parameter
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm_int4.cache import in_int8

BITS = 4
PACK = 32 // BITS
"""Values in an int32, the first in the lowest bits."""
GROUP = 32
"""Inputs with one scale and one zero."""
TOP = 2**BITS - 1


def quantize(weight: Tensor) -> dict[str, Tensor]:
    """[outputs, inputs] -> the checkpoint's tensors, by the layer's parameter. Each group's least
    value becomes 0, its greatest 15.

    `qweight` [outputs, inputs / 8] int32; `scales` [outputs, inputs / 32] float32, `zeros` of the
    same shape, uint8.
    """
    groups = weight.float().view(len(weight), -1, GROUP)
    # A zero is a value too: 0 is stored as itself.
    low = groups.amin(-1).clamp_max(0)
    high = groups.amax(-1).clamp_min(0)
    scales = (high - low).clamp_min(torch.finfo(torch.float32).tiny) / TOP
    zeros = (-low / scales).round()
    values = (groups / scales[..., None]).round().add(zeros[..., None]).clamp(0, TOP)
    shifts = torch.arange(0, 32, BITS)
    packed = (values.view(len(weight), -1, PACK).long() << shifts).sum(-1)
    # The bits of an uint32, which int32 has too.
    stored = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    return {"qweight": stored, "scales": scales, "zeros": zeros.to(torch.uint8)}


def dequantize(qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The weight [outputs, inputs] float32 that the tensors of `quantize` stand for."""
    shifts = torch.arange(0, 32, BITS, dtype=torch.int32, device=qweight.device)
    values = (qweight.unsqueeze(-1) >> shifts & TOP).view(len(qweight), -1, GROUP)
    weight: Tensor = (values - zeros.float()[..., None]) * scales.float()[..., None]
    return weight.flatten(1)


class Int4Method(LinearMethod):
    """A share of the inputs begins and ends with a group: `create` refuses others."""

    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        if spec.inputs.full % GROUP:
            raise UnsupportedError(
                f"{spec.prefix}: {spec.inputs.full} inputs are no multiple of a group's {GROUP}."
            )
        spec.inputs.stored(f"inputs of {spec.prefix}", pack=GROUP)
        outputs, inputs = spec.shape
        grouped = outputs, inputs // GROUP
        layer.qweight = new_parameter(
            (outputs, inputs // PACK), torch.int32, spec.loader(pack=PACK)
        )
        layer.scales = new_parameter(grouped, torch.float32, spec.loader(group=GROUP))
        layer.zeros = new_parameter(grouped, torch.uint8, spec.loader(group=GROUP))
        self.qweight = layer.qweight
        self.scales = layer.scales
        self.zeros = layer.zeros

    def dequantized(self) -> Tensor:
        return dequantize(self.qweight, self.scales, self.zeros)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.dequantized().to(x.dtype), bias)


class Int4(Quantization):
    """Linear layers, experts, and heads that are not tied: a tied one is the embedding, which stays
    as it is."""

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        config = vllm_config.hf_config.get("quantization_config")
        if not config:
            return "its weights are not quantized, and int4 is read from a checkpoint"
        if (size := config.get("group_size")) != GROUP:
            return f"its groups have {size} inputs, not {GROUP}"
        kept = config.get("kv_cache")
        return None if kept in (None, "int8") else f"it keeps KV caches in {kept!r}, not in 'int8'"

    def method(self, spec: LinearSpec) -> LinearMethod | None:
        return None if spec.kind == "embedding" or spec.tied_to is not None else Int4Method()

    def kv_cache(self, spec: KVCacheSpec, prefix: str) -> KVCacheSpec:
        return in_int8(spec) if self.config.get("kv_cache") else spec
