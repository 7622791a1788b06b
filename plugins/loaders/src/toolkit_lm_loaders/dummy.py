"""Weights that nobody has trained."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from toolkit_lm.model import CheckpointLoader, Model
from torch import Tensor

_STD = 0.02


class DummyLoader(CheckpointLoader):
    """Random weights, for measurements. Each depends on its name and shape only, so that ranks
    agree on what they share."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def load(self, model: Model) -> None:
        for name, param in model.named_parameters():
            generator = torch.Generator(device=param.device).manual_seed(zlib.crc32(name.encode()))
            if param.is_floating_point():
                torch.nn.init.normal_(param, std=_STD, generator=generator)
            else:
                param.random_(generator=generator)
