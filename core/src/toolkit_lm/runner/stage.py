"""A pipeline stage: receives tensors from the previous stage, and sends them to the next."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toolkit_lm.config import ParallelConfig
from toolkit_lm.distributed import pipeline_parallel_group
from toolkit_lm.model import IntermediateTensors, Taps


class PipelineStage:
    """This rank's pipeline stage. An engine with one stage has no such object."""

    def __init__(self, parallel: ParallelConfig, taps: Taps | None) -> None:
        """`taps`: the taps of all stages, whose tensors each stage passes on."""
        self._parallel = parallel
        self._taps = taps

    def receive(self, arguments: dict[str, Any]) -> None:
        """Adds the previous stage's tensors to the arguments of the model's forward pass."""
        group = pipeline_parallel_group(self._parallel)
        if group.rank > 0:
            arguments["intermediate"] = group.recv(group.rank - 1)
            if self._taps is not None:
                self._taps.receive(arguments["intermediate"])

    def hand_on(self, out: Tensor | IntermediateTensors, num_tokens: int) -> Tensor | None:
        """Sends a stage's output for the step's tokens to the next stage. The last stage's output,
        hidden states [T, H], is returned."""
        if isinstance(out, Tensor):
            return out
        if self._taps is not None:
            out |= self._taps.sent(num_tokens)
        group = pipeline_parallel_group(self._parallel)
        group.send(out, group.rank + 1)
        return None
