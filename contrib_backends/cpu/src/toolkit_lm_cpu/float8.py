"""Float8Panels: a linear method with its weight in float8 in the kernels' layout."""

from __future__ import annotations

import torch
from toolkit_lm.model import LinearSpec, QuantizedWeight
from torch import Tensor

from toolkit_lm_cpu.arena import Arena
from toolkit_lm_cpu.library import KERNELS, product_type
from toolkit_lm_cpu.panels import LANES, pack
from toolkit_lm_cpu.quantized import QuantizedPanels, in_16_bits, is_halved
from toolkit_lm_cpu.rounding import rounding


class Float8Panels(QuantizedPanels):
    """A linear method with its weight in panels of 16 outputs, in float8.

    The kernels decode weights while they multiply. x is not rounded: a result is that of the
    numbers of the checkpoint, and independent of the rest of the batch.
    """

    def __init__(self, weight: QuantizedWeight, spec: LinearSpec, arena: Arena) -> None:
        """Packs a weight in float8, for which `rounding` must be None."""
        self.outputs, self.inputs = spec.shape
        self.dtype = spec.dtype
        self.rounded = None
        self.bits = 8
        self.is_halved = is_halved(spec)
        self.group = weight.group_size
        self.groups = weight.scales.shape[1]
        self.type = product_type(spec.dtype, self.group)
        self.order = self.values = self.offsets = self.ratios = None
        # Bytes lie in panels as pairs, which are 16 bits as an element of float16 is.
        pairs = weight.codes.contiguous().view(torch.float16)
        halves = 2 if self.is_halved else 1
        packed = pack(pairs, KERNELS["avx2"][torch.float16], arena, halves=halves)
        self.packed = packed.view(weight.codes.dtype)
        self.scales = self._pack_scales(in_16_bits(weight.scales))

    def _rows(self, panels: Tensor, lanes: Tensor) -> Tensor:
        pairs = self.packed.view(torch.int16).view(-1, self.inputs // 2, LANES)
        return pairs[panels, :, lanes].view(self.packed.dtype).float()


def panels_of(weight: QuantizedWeight, spec: LinearSpec, arena: Arena) -> QuantizedPanels:
    """The method of a weight, for which `refusal` must be None."""
    is_float8 = weight.codes.is_floating_point() and rounding(weight) is None
    return (Float8Panels if is_float8 else QuantizedPanels)(weight, spec, arena)
