"""On each worker: a factor of each input or output of a layer, by adapter; and whose rows are
whose."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import msgpack
from safetensors.torch import load_file
from toolkit_lm.attention import slots
from toolkit_lm.errors import CheckpointError
from toolkit_lm.messages import NewSequence
from toolkit_lm.model import NO_EPILOGUE, Epilogue, LinearBase, LinearMethod, Rows, WrappingMethod
from toolkit_lm.step import StepInputs, StepPart
from torch import Tensor

from toolkit_lm_ia3 import WEIGHTS, adapters


class Ia3Method(WrappingMethod):
    """Factors of inputs and of outputs. Rows without an adapter have factors of 1."""

    def __init__(self, inner: LinearMethod, *, tables: list[Tensor]) -> None:
        super().__init__(inner)
        self.inputs, self.outputs = tables

    def apply(
        self,
        x: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue = NO_EPILOGUE,
        *,
        rows: Rows | Tensor = Rows.FLAT,
    ) -> Tensor:
        of_rows = slots("ia3_slots")[rows if isinstance(rows, Tensor) else slice(len(x))]
        out = self.inner.apply(x * self.inputs[of_rows], bias, rows=rows) * self.outputs[of_rows]
        return epilogue.finish(out)


class Ia3Part(StepPart):
    buffers = {"ia3_slots": ("token", torch.int64)}

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given)
        self.names = adapters(self.options.folder)
        self._adapter_of: dict[int, int] = {}
        modules = [m for m in self.model.modules() if isinstance(m, LinearBase)]
        layers = [layer for layer in modules if layer.spec.kind == "linear"]
        places = {
            name: (layer, at) for layer in layers for at, name in enumerate(layer.spec.sources)
        }
        tables: dict[str, list[Tensor]] = {}
        for number, name in enumerate(self.names, 1):
            path = Path(self.options.folder) / name / WEIGHTS
            for key, factors in load_file(path).items():
                source = key.removeprefix("base_model.model.").removesuffix(".ia3_l")
                if source not in places and self.config.parallel.pipeline_parallel_size > 1:
                    continue  # of another stage
                if source not in places or places[source][0].rows is not Rows.FLAT:
                    raise CheckpointError(f"{path}: {key}: no linear layer of the decoder.")
                layer, at = places[source]
                spec = layer.spec
                # PEFT has [1, inputs] for feedforward_modules, and [outputs, 1] for others.
                of_outputs = factors.shape[1] == 1
                share = spec.outputs[at] if of_outputs else spec.inputs
                if factors.numel() != share.full or not (of_outputs or len(spec.outputs) == 1):
                    why = f"has not {share.full} factors, or is of inputs of a fused layer's part"
                    raise CheckpointError(f"{path}: {key} {why}.")
                start = sum(part.size for part in spec.outputs[:at]) if of_outputs else 0
                ones = [torch.ones(len(self.names) + 1, size) for size in reversed(spec.shape)]
                table = tables.setdefault(layer.prefix, ones)[of_outputs]
                own = factors.flatten()[share.start : share.start + share.size]
                table[number, start : start + share.size] = own
        for layer in layers:
            if found := tables.get(layer.prefix):
                placed = [table.to(self.device, layer.spec.dtype) for table in found]
                layer.wrap(partial(Ia3Method, tables=placed))

    def add(self, seq: NewSequence) -> None:
        if (share := seq.inputs.parts.get("ia3")) is not None:
            self._adapter_of[seq.seq_id] = self.names.index(msgpack.decode(share)) + 1

    def remove(self, seq_id: int) -> None:
        self._adapter_of.pop(seq_id, None)

    def context(self, inputs: StepInputs, buffers: Mapping[str, np.ndarray]) -> None:
        of_rows = [self._adapter_of.get(row.seq_id, 0) for row in inputs.plan.scheduled]
        buffers["ia3_slots"][:] = np.repeat(np.array(of_rows, np.int64), inputs.num_tokens)
