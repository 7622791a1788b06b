"""Norms and heads whose parameters an adapter replaces, for the rows of the adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

LOW = "lora_A"
HIGH = "lora_B"
"""A [rank, inputs] and B [outputs, rank], of a head: they are added, and not in the place of a
parameter."""


class Replacing(Protocol):
    """Tells which rows have other parameters."""

    def replaced(
        self, path: str, count: int
    ) -> list[tuple[dict[str, Tensor], float, Tensor | None]]:
        """Parameters, their scale, and rows (None: all) of a call with `count` rows."""


class Replacement:
    """A hook of a module: it computes the rows of adapters again, with their parameters."""

    def __init__(self, module: nn.Module, path: str, grouping: Replacing) -> None:
        self._module = module
        self._path = path
        self._grouping = grouping
        self._handle: RemovableHandle | None = None

    def install(self) -> None:
        self._handle = self._module.register_forward_hook(self._hook, with_kwargs=True)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _hook(
        self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any], out: Any
    ) -> Any:
        is_pair = isinstance(out, tuple)
        result: Tensor = out[0] if is_pair else out
        # With a residual, the second output is the sum that is normalized; it is the input then.
        x = out[1] if is_pair else arguments[0]
        found = self._grouping.replaced(self._path, len(result))
        if not found:
            return out
        self.remove()
        try:
            result = result.clone()
            for parameters, scale, rows in found:
                mine = x if rows is None else x[rows]
                again = self._again(module, parameters, scale, mine, result, rows)
                if rows is None:
                    result = again
                else:
                    result[rows] = again
        finally:
            self.install()
        return (result, *out[1:]) if is_pair else result

    @staticmethod
    def _again(
        module: nn.Module,
        parameters: Mapping[str, Tensor],
        scale: float,
        x: Tensor,
        result: Tensor,
        rows: Tensor | None,
    ) -> Tensor:
        """The result of rows `x` with parameters of an adapter."""
        replaced = {name: tensor for name, tensor in parameters.items() if name not in (LOW, HIGH)}
        if replaced:
            own = {**dict(module.named_parameters(recurse=False)), **replaced}
            found: Tensor = functional_call(module, own, (x,))
        else:
            found = result if rows is None else result[rows]
        if LOW in parameters and type(module) is nn.Linear:
            dtype = x.dtype
            product = x @ parameters[LOW].to(dtype).T @ parameters[HIGH].to(dtype).T
            return found + scale * product
        if LOW in parameters:
            # A sum of its own for each row: its bits do not depend on the others.
            low = [parameters[LOW] @ row for row in x]
            found = found + scale * torch.stack([parameters[HIGH] @ vector for vector in low])
        return found
