"""Readers of quantized weights: linear methods that give way to the kernels' ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from toolkit_lm.model.kernels import Kernels
from toolkit_lm.model.linear_method import LinearMethod, LinearSpec
from toolkit_lm.model.quantized import QuantizedWeight


class QuantizedReader(LinearMethod):
    """Base of methods that read a layer's quantized weight from a checkpoint. Once it is loaded, a
    method of the kernels takes this one's place in the layer.

    A tied head reads the parameters of its embedding.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.parameters: dict[str, nn.Parameter] = {}
        self.made: LinearMethod | None = None
        """The kernels' method, once the weight is loaded."""

    @abstractmethod
    def make_parameters(self, spec: LinearSpec) -> dict[str, nn.Parameter]:
        """The layer's parameters by name, in the checkpoint's layout: uninitialized, on the default
        device, each with a `weight_loader`. Raises ConfigError and UnsupportedError."""

    @abstractmethod
    def read(self, spec: LinearSpec, loaded: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight in `loaded`, the parameters' tensors. Raises CheckpointError."""

    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        self.spec = spec
        tied = spec.tied_to
        self.parameters = (
            tied.parameters if isinstance(tied, QuantizedReader) else self.make_parameters(spec)
        )
        for name, parameter in self.parameters.items():
            setattr(layer, name, parameter)

    def process(self, layer: nn.Module) -> None:
        tied = self.spec.tied_to
        if isinstance(tied, QuantizedReader):
            tied = tied.made
        weight = self.read(
            self.spec, {name: parameter.data for name, parameter in self.parameters.items()}
        )
        for name in self.parameters:
            delattr(layer, name)
        self.parameters = {}
        self.made = self.kernels.quantized_method(replace(self.spec, tied_to=tied), weight)
        layer.method = self.made  # type: ignore[assignment]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        raise AssertionError("the weight is not loaded")

    def embed(self, ids: Tensor) -> Tensor:
        raise AssertionError("the weight is not loaded")
