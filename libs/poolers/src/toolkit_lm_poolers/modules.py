"""Operations on vectors after pooling, in float32: Dense modules, layer norms, L2 norm, matryoshka
sizes, and activations of logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import choose_kernels
from toolkit_lm_weights.safetensors import CheckpointWeights
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm_poolers import details

Activation = Callable[[Tensor], Tensor]


def _sigmoid(logits: Tensor) -> Tensor:
    """torch's own gives the last elements of a tensor, those that fill no vector, other roundings
    than the rest."""
    return logits.neg().exp_().add_(1).reciprocal_()


def _softmax(logits: Tensor) -> Tensor:
    return F.softmax(logits, dim=-1)


def _identity(logits: Tensor) -> Tensor:
    return logits


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"identity": _identity, "sigmoid": _sigmoid, "softmax": _softmax}
)
"""Activations of logits. sigmoid is for one label, or several that do not exclude each other;
softmax is for labels that do."""


def normalize(vectors: Tensor) -> Tensor:
    """To length 1, along the last axis. Zero stays zero."""
    return F.normalize(vectors, p=2, dim=-1)


class Normalize(nn.Module):
    """To length 1, between other heads."""

    def forward(self, vectors: Tensor) -> Tensor:
        return normalize(vectors)


class Dense(nn.Module):
    """sentence-transformers' Dense module: activation(x W^T + b), plus a residual where it has one.
    [..., in] -> [..., out] float32.

    Its weights are buffers that no state dict shows: they are not among the checkpoint's, but lie
    in a folder of their own.
    """

    weight: Tensor
    bias: Tensor | None
    residual_weight: Tensor | None

    def __init__(self, config: details.Dense, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.residual = config.residual
        self.kernels = choose_kernels()
        self.activation: nn.Module = getattr(nn, config.activation)()
        for name, key in (
            ("weight", "linear.weight"),
            ("bias", "linear.bias"),
            ("residual_weight", "residual.weight"),
        ):
            self.register_buffer(name, weights.get(key), persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        out: Tensor = self.activation(self.kernels.linear(vectors, self.weight, self.bias))
        if not self.residual:
            return out
        return out + (
            vectors
            if self.residual_weight is None
            else self.kernels.linear(vectors, self.residual_weight, None)
        )


class LayerNorm(nn.Module):
    """sentence-transformers' LayerNorm module. [..., D] -> [..., D] float32. Weights are kept as
    those of Dense are."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.register_buffer("weight", weights["norm.weight"], persistent=False)
        self.register_buffer("bias", weights["norm.bias"], persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        return F.layer_norm(vectors, self.weight.shape, self.weight, self.bias)


def make_heads(configs: Sequence[details.Head], dummy: bool = False) -> nn.Sequential:
    """The heads of a checkpoint, on the default device. `dummy`: with random weights, and no file
    is read.

    Raises CheckpointError for weights that are missing, unexpected, of a wrong shape, or pickles.
    """
    return nn.Sequential(*(_make_head(config, dummy) for config in configs))


def _make_head(config: details.Head, dummy: bool) -> nn.Module:
    if isinstance(config, details.Normalize):
        return Normalize()
    if isinstance(config, details.LayerNorm):
        return LayerNorm(
            _weights(
                config.folder, {"norm.weight": (config.size,), "norm.bias": (config.size,)}, dummy
            )
        )
    shapes: dict[str, tuple[int, ...]] = {
        "linear.weight": (config.out_features, config.in_features)
    }
    if config.bias:
        shapes["linear.bias"] = (config.out_features,)
    if config.residual and config.in_features != config.out_features:
        shapes["residual.weight"] = (config.out_features, config.in_features)
    return Dense(config, _weights(config.folder, shapes, dummy))


def _tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a folder, or of a file of one linear layer: then as "linear.weight" and
    "linear.bias"."""
    if path.suffix != ".safetensors":
        return dict(CheckpointWeights(path))
    try:
        with safe_open(path, framework="pt", device="cpu") as tensors:
            # It is no dict, whose keys an iteration would give.
            names = list(tensors.keys())
            return {f"linear.{name}": tensors.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{str(path)!r} is no readable safetensors file: {error}") from error


def _weights(folder: str, shapes: Mapping[str, tuple[int, ...]], dummy: bool) -> dict[str, Tensor]:
    """The tensors of `folder`, or of a file, float32 on the default device; exactly those of
    `shapes`. Raises CheckpointError."""
    if dummy:
        return {name: torch.full(shape, shape[-1] ** -0.5) for name, shape in shapes.items()}
    pickled = Path(folder) / "pytorch_model.bin"
    if pickled.is_file() and not (Path(folder) / "model.safetensors").is_file():
        raise CheckpointError(
            f"{str(pickled)!r} is a pickle, which can run code and is not read. Convert it to "
            "safetensors: load the model with "
            "sentence-transformers and call save_pretrained."
        )
    found = _tensors(Path(folder))
    for name in shapes.keys() ^ found.keys():
        problem = "lack" if name in shapes else "hold, unexpectedly,"
        raise CheckpointError(f"the weights in {folder!r} {problem} {name!r}.")
    for name, tensor in found.items():
        if tuple(tensor.shape) != shapes[name] or not tensor.is_floating_point():
            kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise CheckpointError(
                f"{name!r} of the weights in {folder!r} is {kind}; its config.json asks for "
                f"floats {list(shapes[name])}."
            )
    return {
        name: tensor.to(torch.get_default_device(), torch.float32) for name, tensor in found.items()
    }
