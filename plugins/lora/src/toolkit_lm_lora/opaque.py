"""Layers of a compiled model that adapters may change: to the compiler, each is one opaque op."""

from __future__ import annotations

from typing import Any

import torch
from toolkit_lm.attention import op_layer
from toolkit_lm.model import NO_EPILOGUE, Epilogue, LinearBase, LinearMethod, Rows, WrappingMethod
from torch import Tensor


class OpaqueMethod(WrappingMethod):
    """Computes with `current`, the method of the step, which a compiled pass finds when it runs:
    adapters come and go without a new compilation."""

    def __init__(self, inner: LinearMethod, layer: LinearBase) -> None:
        super().__init__(inner)
        self.current = inner
        self._spec = layer.spec

    def dequantized(self) -> Tensor:
        return self.inner.dequantized()

    def apply(
        self,
        x: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue = NO_EPILOGUE,
        *,
        rows: Rows | Tensor = Rows.FLAT,
    ) -> Tensor:
        if not torch.compiler.is_compiling():
            return self.current.apply(x, bias, epilogue, rows=rows)
        activation, gated, residual = epilogue
        out = x.new_empty(x.shape[0], self._spec.shape[0] // (2 if gated else 1))
        torch.ops.toolkit_lm.linear(x, bias, residual, out, self._spec.prefix, activation, gated)
        return out

    def embed(self, ids: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return self.current.embed(ids)
        spec = self._spec
        out = torch.empty(ids.shape[0], spec.shape[1], dtype=spec.dtype, device=ids.device)
        torch.ops.toolkit_lm.linear(ids, None, None, out, spec.prefix, None, False)
        return out


def _linear(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    layer: str,
    activation: str | None,
    gated: bool,
) -> None:
    """Writes what the layer of that name computes to `out`. The op `toolkit_lm::linear`."""
    own = op_layer(layer)
    if own.spec.kind == "embedding":
        out.copy_(own.method.embed(x))
        return
    is_plain = activation is None and residual is None
    epilogue = NO_EPILOGUE if is_plain else Epilogue(activation, gated, residual)
    out.copy_(own.method.apply(x, bias, epilogue, rows=own.rows))


_library: Any = torch.library.Library("toolkit_lm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "linear(Tensor x, Tensor? bias, Tensor? residual, Tensor(a!) out, str layer, str? activation, "
    "bool gated) -> ()"
)
_library.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake(
    "toolkit_lm::linear",
    lambda x, bias, residual, out, layer, activation, gated: None,
    lib=_library,
)
