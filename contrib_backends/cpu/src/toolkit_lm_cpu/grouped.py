"""GroupedPanels: one product of several weights in panels, each with rows of its own.
PanelExperts: all that experts with such weights compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from toolkit_lm.model import NO_EPILOGUE, Epilogue, LinearMethod
from torch import Tensor

from toolkit_lm_cpu.arguments import LinearPart, Quantized
from toolkit_lm_cpu.library import _kernels
from toolkit_lm_cpu.panels import ACTIVATIONS, LANES, PanelLinear, number_of
from toolkit_lm_cpu.quantized import QuantizedPanels, size_of_codes


class GroupedPanels:
    """The rows of several weights of one shape, multiplied in one call. Each row has the bits that
    its weight's own method gives it."""

    made_of_weights = True

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
        self.group = _kernels.group(
            tuple(
                LinearPart(weights=weight.data_ptr(), quantized=how)
                for weight, how in zip(packed, quantized, strict=True)
                if weight is not None
            )
        )
        self.code_bytes = max(
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
        number = number_of(activation, gated)
        fused = number is not None and (not gated or self.outputs % (2 * LANES) == 0)
        outputs = self.outputs // 2 if gated and fused else self.outputs
        if rows.stride(1) != 1 or rows.stride(0) % 2:
            rows = rows.contiguous()
        out = rows.new_empty(len(rows), outputs)
        codes = torch.empty(len(rows) * self.code_bytes, dtype=torch.uint8)
        element = rows.element_size()
        _kernels.grouped(
            self.type,
            self.group,
            ends=ends.data_ptr(),
            biases=0 if biases is None else biases.data_ptr(),
            bias_bytes=0 if biases is None else biases.stride(0) * element,
            element=element,
            x=rows.data_ptr(),
            x_stride=rows.stride(0),
            out=out.data_ptr(),
            codes=codes.data_ptr(),
            code_bytes=self.code_bytes,
            inputs=self.inputs,
            outputs=outputs,
            activation=number if number is not None and fused else ACTIVATIONS[None],
            is_gated=gated and fused,
        )
        return out if fused else epilogue.finish(out)


class PanelExperts:
    """Experts in one call: their rows are brought together, multiplied as GroupedPanels does, and
    summed with their weights. A RoutedProduct."""

    def __init__(
        self,
        products: tuple[GroupedPanels, GroupedPanels],
        biases: tuple[Tensor | None, Tensor | None],
        epilogue: Epilogue,
        first: int,
    ) -> None:
        self.products = products
        self.biases = biases
        """They own the memory that the kernels point to."""
        self.first = first
        self.gated = epilogue.gated
        number = number_of(epilogue.activation, epilogue.gated)
        assert number is not None
        self.activation = number

    @staticmethod
    def of(
        gate_up: Sequence[LinearMethod],
        down: Sequence[LinearMethod],
        biases: tuple[Tensor | None, Tensor | None],
        epilogue: Epilogue,
        first: int,
    ) -> PanelExperts | None:
        """None: weights cannot be grouped, the kernels lack the activation, or a vector does not
        divide the rows."""
        products = GroupedPanels.of(gate_up), GroupedPanels.of(down)
        if products[0] is None or products[1] is None:
            return None
        whole = 2 * LANES if epilogue.gated else LANES
        fits = products[0].outputs % whole == products[1].outputs % LANES == 0
        if not fits or number_of(epilogue.activation, epilogue.gated) is None:
            return None
        contiguous = (
            None if biases[0] is None else biases[0].contiguous(),
            None if biases[1] is None else biases[1].contiguous(),
        )
        return PanelExperts((products[0], products[1]), contiguous, epilogue, first)

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], experts [T, K] (int64), weights [T, K] (float32) -> [T, H]."""
        gate_up, down = self.products
        up_bias, down_bias = self.biases
        experts = experts.long().contiguous()
        weights = weights.float().contiguous()
        if x.stride(1) != 1:
            x = x.contiguous()
        tokens, top = experts.shape
        count = tokens * top
        element = x.element_size()
        inner = down.inputs
        out = x.new_empty(tokens, down.outputs)
        rows = x.new_empty(count, gate_up.inputs + inner)
        codes = torch.empty(count * max(gate_up.code_bytes, down.code_bytes), dtype=torch.uint8)
        _kernels.experts(
            gate_up.type,
            gate_up.group,
            down.group,
            x=x.data_ptr(),
            chosen=experts.data_ptr(),
            weights=weights.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            tokens=tokens,
            top=top,
            first=self.first,
            hidden=gate_up.inputs,
            inner=inner,
            element=element,
            up_biases=0 if up_bias is None else up_bias.data_ptr(),
            down_biases=0 if down_bias is None else down_bias.data_ptr(),
            up_bias_bytes=0 if up_bias is None else up_bias.stride(0) * element,
            down_bias_bytes=0 if down_bias is None else down_bias.stride(0) * element,
            rows=rows.data_ptr(),
            between=rows.data_ptr() + count * gate_up.inputs * element,
            codes=codes.data_ptr(),
            up_code_bytes=gate_up.code_bytes,
            down_code_bytes=down.code_bytes,
            activation=self.activation,
            is_gated=self.gated,
        )
        return out
