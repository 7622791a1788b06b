"""The order in which a model stores the rows of a layer. Adapters have the checkpoint's, and a
class that reads weights by itself may have another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import LinearBase, LinearMethod, Model
from torch import Tensor, nn

from toolkit_lm_lora.joining import of_inputs, of_outputs, span

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
_MOST_OFF = 0.5
"""Greatest error of a row by quantization, relative to its norm. Another row is off by 1.4."""


class RowOrder:
    """Compares layers with the checkpoint, each once, of classes that override `load_weights`."""

    def __init__(self, model: nn.Module, methods: Mapping[str, LinearMethod]) -> None:
        self.weights: Weights | None = None
        """Reads the checkpoint's tensors."""
        self._methods = methods
        self._owners: dict[str, str] = {}
        """By layer, the class that reads its weight by itself."""
        for module in model.modules():
            if isinstance(module, Model) and type(module).load_weights is not Model.load_weights:
                for layer in module.modules():
                    if isinstance(layer, LinearBase):
                        self._owners[layer.prefix] = type(module).__name__
        self._known: dict[tuple[str, int | None], Tensor | None] = {}

    def of(self, layer: LinearBase, part: int | None) -> Tensor | None:
        """Indices of the checkpoint's rows, for each of this rank's rows of a layer or of its part;
        None: they are in the checkpoint's order. Raises UnsupportedError where neither holds."""
        if layer.prefix not in self._owners or self.weights is None:
            return None
        key = layer.prefix, part
        if key not in self._known:
            self._known[key] = self._compared(layer, part)
        return self._known[key]

    def _compared(self, layer: LinearBase, part: int | None) -> Tensor | None:
        spec = layer.spec
        is_fused = part is None and len(spec.outputs) > 1
        sources = spec.sources if part is None else spec.sources[part : part + 1]
        full = [*spec.outputs] if part is None else [spec.outputs[part]]
        rows: slice | None = None
        if part is not None and len(spec.sources) == 1 < len(spec.outputs):
            sources = spec.sources
            first = sum(shard.full for shard in spec.outputs[:part])
            rows = slice(first, first + spec.outputs[part].full)
        stored = self._stored(f"{sources[0]}.weight") if len(sources) == 1 else None
        if stored is not None and rows is not None:
            stored = stored[rows]
        shape = sum(shard.full for shard in full), spec.inputs.full
        if stored is not None and stored.shape != shape and stored.T.shape == shape:
            stored = stored.T
        try:
            own = self._methods[layer.prefix].dequantized()[span(layer, part)].cpu()
        except NotImplementedError:
            own = None
        if stored is None or stored.shape != shape or own is None:
            if is_fused and len(sources) == 1:
                raise self._error(layer, "which cannot be compared with the checkpoint's")
            return None
        stored = stored.to(own.dtype)
        mine = of_inputs(of_outputs(stored, full), layer)
        for same in (
            (mine, of_inputs(of_outputs(stored.T, full), layer))
            if (shape[0] == shape[1])
            else (mine,)
        ):
            off = (same.float() - own.float()).norm(dim=1)
            if bool((off <= _MOST_OFF * same.float().norm(dim=1)).all()):
                return None
        places: dict[bytes, list[int]] = {}
        for at, row in enumerate(of_inputs(stored, layer)):
            places.setdefault(_bytes(row), []).append(at)
        found = [places.get(_bytes(row), []) for row in own]
        if any(len(those) != 1 for those in found):
            raise self._error(layer, "in another order than the checkpoint")
        return torch.tensor([those[0] for those in found])

    def _stored(self, name: str) -> Tensor | None:
        assert self.weights is not None
        return next((tensor for key, tensor in self.weights() if key == name), None)

    def _error(self, layer: LinearBase, why: str) -> UnsupportedError:
        owner = self._owners[layer.prefix]
        return UnsupportedError(
            f"{layer.prefix!r} cannot be adapted: {owner}.load_weights stores its rows {why}."
        )


def _bytes(row: Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes()
