"""On each worker: adds B (A x) to what linear layers give, by the adapter of each token's row."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Raw, msgpack
from safetensors.torch import load_file
from toolkit_lm.messages import NewSequence, StepPlan
from toolkit_lm.step import StepInputs, StepPart, StepRun
from torch import Tensor, nn

Adapter = dict[str, tuple[Tensor, Tensor]]
"""By layer, A [rank, inputs] and B [outputs, rank]."""


class LoraPart(StepPart):
    """The file of an adapter has `LAYER.lora_A` and `LAYER.lora_B` for the layers that it changes,
    by the model's own names."""

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given)
        self._slots: dict[int, Adapter] = {}
        self._slot_of: dict[str, int] = {}
        """By digest."""
        self._digests: dict[int, str] = {}
        """By sequence."""
        self._hooks: dict[str, Any] = {}
        """By layer, from when an adapter first changes it: others are called as if there were no
        adapters."""
        self._tokens: dict[int, Tensor] = {}
        """By slot, the indices of its tokens in the step."""

    def begin(self, plan: StepPlan, step: StepRun) -> Raw | None:
        if (told := plan.parts.get("lora")) is None:
            return None
        done = {}
        for slot, name, digest in msgpack.decode(told):
            try:
                self._load(slot, name, digest)
                done[digest] = None
            except Exception as error:
                done[digest] = f"{type(error).__name__}: {error}"
        return Raw(msgpack.encode(done))

    def _load(self, slot: int, name: str, digest: str) -> None:
        file = Path(self.options.folder) / f"{name}.safetensors"
        tensors = {key: one.to(self.device) for key, one in load_file(file).items()}
        modules = dict(self.model.named_modules())
        layers = {key.rpartition(".")[0] for key in tensors}
        if unknown := sorted(layers - modules.keys()):
            raise ValueError(f"the model has no layer {unknown[0]!r}")
        for layer in layers - self._hooks.keys():
            hook = partial(self._add, layer)
            self._hooks[layer] = modules[layer].register_forward_hook(hook)
        self._slots[slot] = {
            layer: (tensors[f"{layer}.lora_A"], tensors[f"{layer}.lora_B"]) for layer in layers
        }
        self._slot_of = {its: one for its, one in self._slot_of.items() if one != slot}
        self._slot_of[digest] = slot

    def _add(self, layer: str, module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        for slot, tokens in self._tokens.items():
            if (pair := self._slots[slot].get(layer)) is not None:
                low, high = pair
                out[tokens] += given[0][tokens] @ low.T @ high.T
        return out

    def add(self, seq: NewSequence) -> None:
        if (share := seq.inputs.parts.get("lora")) is not None:
            self._digests[seq.seq_id] = msgpack.decode(share)[1]

    def remove(self, seq_id: int) -> None:
        self._digests.pop(seq_id, None)

    def inputs(self, inputs: StepInputs) -> dict[str, Tensor]:
        of_rows = [
            self._slot_of[self._digests[row.seq_id]] if row.seq_id in self._digests else -1
            for row in inputs.plan.scheduled
        ]
        of_tokens = np.repeat(of_rows, inputs.num_tokens)
        self._tokens = {
            slot: torch.from_numpy(np.flatnonzero(of_tokens == slot)).to(self.device)
            for slot in {one for one in of_rows if one >= 0}
        }
        return {}

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
