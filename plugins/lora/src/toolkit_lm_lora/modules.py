"""Norms and heads whose parameters an adapter replaces, for the rows of the adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle


class Replacing(Protocol):
    """Tells which rows have other parameters."""

    def replaced(self, path: str, count: int) -> list[tuple[dict[str, Tensor], Tensor | None]]:
        """Parameters and rows (None: all) of a call with `count` rows."""


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
            for parameters, rows in found:
                own = {**dict(module.named_parameters(recurse=False)), **parameters}
                again = functional_call(module, own, (x if rows is None else x[rows],))
                if rows is None:
                    result = again
                else:
                    result[rows] = again
        finally:
            self.install()
        return (result, *out[1:]) if is_pair else result
