"""GatedMethod: linear methods whose gate is a kernel."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol

import torch
from toolkit_lm.model import NO_EPILOGUE, Epilogue, LinearMethod, Rows
from torch import Tensor


class Gates(Protocol):
    """Kernels of gates: TritonKernels."""

    def has_gate(self, activation: str, x: Tensor) -> bool: ...

    def gate(self, x: Tensor, activation: str) -> Tensor: ...


class GatedMethod(LinearMethod):
    """Base of linear methods that compute the gate in a kernel after the product."""

    dtype: torch.dtype
    """The dtype of x."""
    added: Any = None
    """Adapters of rows of the step: an Added of `low_rank`, or None."""

    def __init__(self, kernels: Gates) -> None:
        self._kernels = kernels

    @property
    @abstractmethod
    def stored(self) -> Tensor:
        """The weight, or its codes: [outputs, ...]."""

    def apply(
        self,
        x: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue = NO_EPILOGUE,
        *,
        rows: Rows | Tensor = Rows.FLAT,
    ) -> Tensor:
        activation, gated, _ = epilogue
        out = self.multiply(x, bias)
        added = self.added
        if added is not None and rows is Rows.FLAT and added.step.num_rows == len(x):
            out = added.to(x, out)
        if gated and activation is not None and self._kernels.has_gate(activation, x):
            return self._kernels.gate(out, activation)
        return out if epilogue is NO_EPILOGUE else epilogue.finish(out)
