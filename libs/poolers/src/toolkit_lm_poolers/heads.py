"""Heads: from pooled vectors to what a request gets. `forward` is the same for all requests,
`finish` is what each asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import partial

import torch
from toolkit_lm.pooling_params import PoolingParams
from torch import Tensor, nn

from toolkit_lm_poolers.modules import Activation, normalize


class Head(nn.Module, ABC):
    """Module after pooling. It computes in float32."""

    size: int
    """Size of the last axis of `forward`'s output."""

    @abstractmethod
    def forward(self, vectors: Tensor) -> Tensor:
        """[N, H] float32 -> [N, size] float32."""

    @abstractmethod
    def finish(self, values: Tensor, params: PoolingParams) -> Tensor:
        """[N, size] of `forward`, as a request wants it: [N, ...]."""

    @abstractmethod
    def postprocess_key(self, params: PoolingParams) -> Hashable:
        """Requests with equal keys are finished together."""


class EmbeddingHead(Head):
    """Embeddings: the checkpoint's modules, the first `dimensions` (Kusupati et al. 2022:
    matryoshka), then L2 norm."""

    def __init__(
        self, size: int, modules: nn.Module, *, normalize: bool, truncate_dim: int | None = None
    ) -> None:
        super().__init__()
        self.size = size
        self.layers = modules
        self.normalize = normalize
        self.truncate_dim = truncate_dim

    def forward(self, vectors: Tensor) -> Tensor:
        values: Tensor = self.layers(vectors)
        return values

    def postprocess_key(self, params: PoolingParams) -> tuple[int | None, bool]:
        dimensions = self.truncate_dim if params.dimensions is None else params.dimensions
        return dimensions, self.normalize if params.normalize is None else params.normalize

    def finish(self, values: Tensor, params: PoolingParams) -> Tensor:
        dimensions, to_unit = self.postprocess_key(params)
        assert dimensions is None or dimensions <= values.shape[-1], (
            "dimensions were not checked before"
        )
        values = values[..., :dimensions]
        return normalize(values) if to_unit else values


class ClassifierHead(Head):
    """Logits of a classifier, shifted and scaled: activation((x - mean) / (sigma * temperature)).

    `classifier` [N, H] -> [N, size] stays the model's: its weights are not counted among the
    pooler's.
    """

    def __init__(
        self,
        classifier: Callable[[Tensor], Tensor],
        size: int,
        activation: Activation,
        *,
        use_activation: bool = True,
        mean: float = 0.0,
        sigma: float = 1.0,
        temperature: float = 1.0,
        returned_ids: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        # Wrapped, it is no submodule of this one: its weights keep the one name that they have in
        # the model.
        self._classify = partial(classifier)
        self._activate = partial(activation)
        self.use_activation = use_activation
        self.mean = mean
        self.scale = 1 / (sigma * temperature)
        self.returned_ids = returned_ids

    def forward(self, vectors: Tensor) -> Tensor:
        logits = self._classify(vectors).float()
        assert logits.shape[-1] == self.size, (
            f"the classifier gives {logits.shape[-1]} labels, not {self.size}"
        )
        return (
            logits if (self.mean, self.scale) == (0.0, 1.0) else (logits - self.mean) * self.scale
        )

    def postprocess_key(self, params: PoolingParams) -> tuple[bool, tuple[int, ...] | None]:
        use_activation = (
            self.use_activation if params.use_activation is None else params.use_activation
        )
        ids = self.returned_ids if params.returned_token_ids is None else params.returned_token_ids
        return use_activation, tuple(ids) if ids is not None else None

    def finish(self, values: Tensor, params: PoolingParams) -> Tensor:
        use_activation, ids = self.postprocess_key(params)
        if ids is not None:
            # Among the logits, and before softmax: the chosen ones' probabilities add up to 1.
            values = values[
                ..., torch.tensor(ids, dtype=torch.int64).to(values.device, non_blocking=True)
            ]
        return self._activate(values) if use_activation else values
