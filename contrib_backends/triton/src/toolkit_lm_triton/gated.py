"""GatedMethod: linear methods whose gate is a kernel."""

from __future__ import annotations

from typing import Protocol

from toolkit_lm.model import NO_EPILOGUE, Epilogue, LinearMethod, Rows
from torch import Tensor


class Gates(Protocol):
    """Kernels of gates: TritonKernels."""

    def has_gate(self, activation: str, x: Tensor) -> bool: ...

    def gate(self, x: Tensor, activation: str) -> Tensor: ...


class GatedMethod(LinearMethod):
    """Base of linear methods that compute the gate in a kernel after the product."""

    def __init__(self, kernels: Gates) -> None:
        self._kernels = kernels

    def apply(
        self,
        x: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue = NO_EPILOGUE,
        *,
        rows: Rows | Tensor = Rows.FLAT,
    ) -> Tensor:
        activation, gated, _ = epilogue
        if not gated or activation is None or not self._kernels.has_gate(activation, x):
            return super().apply(x, bias, epilogue)
        return self._kernels.gate(self.multiply(x, bias), activation)
