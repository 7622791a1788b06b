"""The classifier on top of a language model, in float32."""

from __future__ import annotations

import torch
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import choose_kernels
from torch import Tensor, nn


class Classifier(nn.Module):
    """x W^T + b: pooled vectors [R, H] float32 -> [R, labels] float32.

    Its weights are buffers that no state dict shows, because the checkpoint may not hold them as
    such. Until they are filled they are small and constant, which is what dummy weights stay.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, size: int, num_labels: int, *, bias: bool) -> None:
        super().__init__()
        self.kernels = choose_kernels()
        self.register_buffer(
            "weight",
            torch.full((num_labels, size), size**-0.5, dtype=torch.float32),
            persistent=False,
        )
        self.register_buffer(
            "bias", torch.zeros(num_labels, dtype=torch.float32) if bias else None, persistent=False
        )
        self._filled: set[str] = set()

    def fill(self, name: str, tensor: Tensor) -> None:
        """Takes the values of "weight" or "bias". Raises CheckpointError for what does not fit."""
        own = dict(self.named_buffers()).get(name)
        if own is None:
            raise CheckpointError(f"the classifier has no {name!r}.")
        if tensor.shape != own.shape or not tensor.is_floating_point():
            kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise CheckpointError(
                f"the classifier's {name!r} is {kind}, but config.json asks for floats "
                f"{list(own.shape)}."
            )
        own.copy_(tensor)
        self._filled.add(name)

    def check_filled(self, head: str) -> None:
        """Raises CheckpointError unless all of it was filled; `head` is the name of the model's
        head."""
        missing = dict(self.named_buffers()).keys() - self._filled
        if missing:
            raise CheckpointError(
                f"the checkpoint holds neither 'score' nor '{head}' with "
                f"{', '.join(sorted(missing))}."
            )

    def forward(self, vectors: Tensor) -> Tensor:
        return self.kernels.linear(vectors, self.weight, self.bias)
