"""Slots: values of parts for each token or row of a step, at fixed addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.attention import BatchLimits
from toolkit_lm.errors import PluginError
from toolkit_lm.runner.batch import Buffer
from toolkit_lm.step import StepInputs, StepPart

_Fill = Callable[[StepInputs, Mapping[str, np.ndarray]], None]


class Slots:
    """Holds the buffers of all parts, by name."""

    def __init__(
        self, parts: Mapping[str, StepPart], limits: BatchLimits, device: torch.device
    ) -> None:
        """Raises PluginError if two parts have buffers of the same name."""
        self.tensors: dict[str, Tensor] = {}
        self.fills: list[tuple[_Fill, dict[str, tuple[bool, Buffer]]]] = []
        for name, part in parts.items():
            own = {}
            for buffer, (kind, dtype) in part.buffers.items():
                if buffer in self.tensors:
                    raise PluginError(
                        f"part {name!r} has a buffer {buffer!r}, and so has another part: their "
                        "names must differ."
                    )
                size = limits.num_tokens if kind == "token" else limits.num_rows
                made = Buffer((size,), dtype, device)
                self.tensors[buffer] = made.upload(size)
                own[buffer] = (kind == "token", made)
            if own:
                self.fills.append((part.context, own))

    def fill(self, inputs: StepInputs) -> None:
        """Lets the parts fill their buffers for a step, and copies them to the device."""
        sizes = len(inputs.rows), len(inputs.token_index)
        for fill, buffers in self.fills:
            fill(
                inputs,
                {name: buffer.host[: sizes[unit]] for name, (unit, buffer) in buffers.items()},
            )
            for of_tokens, buffer in buffers.values():
                buffer.host[sizes[of_tokens] :] = 0
                buffer.upload(len(buffer.host))
