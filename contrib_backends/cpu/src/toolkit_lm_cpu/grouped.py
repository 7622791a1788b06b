"""GroupedPanels: one product of several weights in panels, each with rows of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from toolkit_lm.model import NO_EPILOGUE, Epilogue, LinearMethod
from torch import Tensor

from toolkit_lm_cpu.arguments import LinearPart, Quantized
from toolkit_lm_cpu.library import _kernels
from toolkit_lm_cpu.panels import ACTIVATIONS, LANES, PanelLinear
from toolkit_lm_cpu.quantized import QuantizedPanels, size_of_codes


class GroupedPanels:
    """The rows of several weights of one shape, multiplied in one call. Each row has the bits that
    its weight's own method gives it."""

    def __init__(self, methods: Sequence[PanelLinear | QuantizedPanels]) -> None:
        first = methods[0]
        self.type = first.type
        self.outputs = first.outputs
        self.inputs = first.inputs
        quantized = [
            method.quantized if isinstance(method, QuantizedPanels) else Quantized()
            for method in methods
        ]
        packed = [method.packed for method in methods]
        self._group = _kernels.group(
            tuple(
                LinearPart(weights=weight.data_ptr(), quantized=how)
                for weight, how in zip(packed, quantized, strict=True)
                if weight is not None
            )
        )
        self._code_bytes = max(
            size_of_codes(how) if isinstance(method, QuantizedPanels) else 0
            for method, how in zip(methods, quantized, strict=True)
        )
        self._methods = tuple(methods)
        """They own the memory that the kernels point to."""

    @staticmethod
    def of(methods: Sequence[LinearMethod]) -> GroupedPanels | None:
        """None: some weight is not in panels, or has its halves apart, or another shape."""
        ours = [
            method
            for method in methods
            if (type(method) is PanelLinear and method.packed is not None)
            or isinstance(method, QuantizedPanels)
        ]
        kinds = {
            (isinstance(method, PanelLinear), method.type, method.outputs, method.inputs)
            for method in ours
        }
        if len(ours) < len(methods) or len(kinds) != 1 or any(m.is_halved for m in ours):
            return None
        return GroupedPanels(ours)

    def __call__(
        self, rows: Tensor, ends: Tensor, biases: Tensor | None, epilogue: Epilogue = NO_EPILOGUE
    ) -> Tensor:
        """Rows [R, inputs] in the order of the weights, ends [E] (int32) of each one's rows, biases
        [E, outputs] or None -> [R, outputs], or half of them if the epilogue is gated. Rows past
        the last end are undefined."""
        activation, gated, residual = epilogue
        assert residual is None
        fused = activation in ACTIVATIONS and (not gated or self.outputs % (2 * LANES) == 0)
        outputs = self.outputs // 2 if gated and fused else self.outputs
        if rows.stride(1) != 1 or rows.stride(0) % 2:
            rows = rows.contiguous()
        out = rows.new_empty(len(rows), outputs)
        codes = torch.empty(len(rows) * self._code_bytes, dtype=torch.uint8)
        element = rows.element_size()
        _kernels.grouped(
            self.type,
            self._group,
            ends=ends.data_ptr(),
            biases=0 if biases is None else biases.data_ptr(),
            bias_bytes=0 if biases is None else biases.stride(0) * element,
            element=element,
            x=rows.data_ptr(),
            x_stride=rows.stride(0),
            out=out.data_ptr(),
            codes=codes.data_ptr(),
            code_bytes=self._code_bytes,
            inputs=self.inputs,
            outputs=outputs,
            activation=ACTIVATIONS[activation] if fused else ACTIVATIONS[None],
            is_gated=gated and fused,
        )
        return out if fused else epilogue.finish(out)
