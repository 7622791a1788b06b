"""Random weights in place of trained ones."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from toolkit_lm.model import CheckpointLoader, Model
from torch import Tensor

_STD = 0.02


class DummyLoader(CheckpointLoader):
    """Random weights, for measurements. Each depends on its name and shape only, so that ranks
    agree on what they share. A parameter's attributes `least` (0 by default) and `most` limit its
    integers: the groups of a quantized weight."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def load(self, model: Model) -> None:
        for name, param in model.named_parameters():
            generator = torch.Generator(device=param.device).manual_seed(zlib.crc32(name.encode()))
            if not param.is_floating_point():
                most = getattr(param, "most", None)
                least = getattr(param, "least", 0)
                limits = () if most is None else (least, most + 1)
                param.random_(*limits, generator=generator)
            elif param.itemsize == 1:
                drawn = torch.empty(param.shape, device=param.device)
                param.copy_(torch.nn.init.normal_(drawn, std=_STD, generator=generator))
            else:
                torch.nn.init.normal_(param, std=_STD, generator=generator)
