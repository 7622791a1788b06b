"""Networks that a worker has beside its model, such as a draft model's: what gives up a worker's
weights finds theirs here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn


class HasNetwork(Protocol):
    """A part of a worker that has a network with weights of its own."""

    network: nn.Module
    """It may hold tensors of the worker's model, too."""

    def made_again(self) -> nn.Module:
        """Makes the network anew, from its checkpoint. Raises CheckpointError, ConfigError."""


_BESIDE: WeakKeyDictionary[nn.Module, WeakSet[HasNetwork]] = WeakKeyDictionary()
"""Parts by the worker's model. Both end when nobody else refers to them."""


def add_beside(model: nn.Module, part: HasNetwork) -> None:
    """Tells of a part of the worker of `model`, in the thread that loads `model`."""
    _BESIDE.setdefault(model, WeakSet()).add(part)


def networks_beside(model: nn.Module) -> Sequence[HasNetwork]:
    """Parts of the worker of `model` that have a network."""
    return tuple(_BESIDE.get(model, ()))
