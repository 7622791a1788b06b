"""Workers' half of records: reads hidden states and routed experts of the tokens that a step
computes."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from msgspec import Raw, msgpack
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm.messages import Array, NewSequence, StepPlan, StepResult
from toolkit_lm.model import tappable
from toolkit_lm.plugin import Plugins
from toolkit_lm.step import StepInputs, StepPart, StepRun
from torch import Tensor, nn

from toolkit_lm_rl.records import (
    HIDDEN_STATES,
    LAST,
    ROUTED_EXPERTS,
    Facts,
    Rows,
    Wanted,
    layer_names,
)


class _RecordsPart(StepPart):
    """Reads rows of the sequences that ask for them."""

    ranks = "last_stage"
    name: ClassVar[str]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._wanted: dict[int, Wanted] = {}
        # The first rank answers.
        self._reads = self.config.parallel.tensor_parallel_rank == 0

    def shape(self) -> tuple[int, int]:
        """Layers and width of a row."""
        raise NotImplementedError

    def read(self, index: Tensor, hidden_states: Tensor, step: StepRun) -> np.ndarray:
        """Rows [N, layers, width] of the step's tokens `index` [N]."""
        raise NotImplementedError

    def facts(self) -> Raw:
        dtype = "float32" if self.name == HIDDEN_STATES else "int16"
        return Raw(msgpack.encode(Facts(self.shape(), dtype)))

    def add(self, seq: NewSequence) -> None:
        if self.name in seq.inputs.parts:
            self._wanted[seq.seq_id] = msgpack.decode(seq.inputs.parts[self.name], type=Wanted)

    def remove(self, seq_id: int) -> None:
        self._wanted.pop(seq_id, None)

    def finish(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
    ) -> Raw | None:
        if not self._wanted or not self._reads:
            return None
        places = []
        found = []
        for number, row in enumerate(inputs.plan.scheduled):
            if (wanted := self._wanted.get(row.seq_id)) is None:
                continue
            first = max(row.start, wanted.start)
            end = min(row.start + row.num_tokens, wanted.end)
            if first < end:
                begin = int(inputs.query_start[number]) + first - row.start
                places.append((row.seq_id, first, end - first))
                found.append(np.arange(begin, begin + end - first))
        if not places:
            return None
        index = torch.from_numpy(np.concatenate(found)).to(self.device)
        values = np.ascontiguousarray(self.read(index, hidden_states, step))
        return Raw(msgpack.encode(Rows(places, Array.of(values))))


class HiddenStatesPart(_RecordsPart):
    """Reads hidden states of the layers that the option names, in float32."""

    name = HIDDEN_STATES

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._layers = _resolved(self.model, self.options)
        self.taps = [name for name in self._layers if name != LAST]

    @classmethod
    def taps_of(
        cls, model: nn.Module, config: VllmConfig, *, plugins: Plugins, options: Any
    ) -> list[str]:
        return [name for name in _resolved(model, options) if name != LAST]

    def shape(self) -> tuple[int, int]:
        sizes = self.config.hf_config.get("text_config") or self.config.hf_config
        size = next(sizes[name] for name in ("hidden_size", "d_model", "n_embd") if name in sizes)
        return len(self._layers), int(size)

    def begin(self, plan: StepPlan, step: StepRun) -> None:
        self.reads_taps = bool(self._wanted)

    def read(self, index: Tensor, hidden_states: Tensor, step: StepRun) -> np.ndarray:
        rows = [
            (hidden_states if name == LAST else step.tap(name))[index].float()
            for name in self._layers
        ]
        return torch.stack(rows, 1).cpu().numpy()


def _resolved(model: nn.Module, options: Any) -> list[str]:
    """Names of layers, some of which the option gives as numbers."""
    names = [*tappable(model)]
    found = []
    for stated in layer_names(options.hidden_states):
        if not stated.isdecimal():
            found.append(stated)
            continue
        same = [name for name in names if name.rpartition(".")[2] == stated]
        if len(same) != 1:
            raise ConfigError(
                f"rl.hidden_states: {len(same)} layers have the number {stated}. Give one of "
                f"{', '.join(names[:4])}, ... or {LAST!r}."
            )
        found += same
    return found


class RoutedExpertsPart(_RecordsPart):
    """Reads the experts that the routers of all layers have chosen, in the order of layers."""

    name = ROUTED_EXPERTS

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        layers = [m for m in self.model.modules() if hasattr(m, "record_choices")]
        if not layers:
            raise UnsupportedError(
                f"rl.routed_experts: {type(self.model).__name__} has no routed experts that can be "
                "recorded. Those of the native mixtures of experts can."
            )
        if self.config.parallel.pipeline_parallel_size > 1:
            raise UnsupportedError(
                "rl.routed_experts: experts are recorded in one pipeline stage: lower "
                "pipeline_parallel_size."
            )
        scheduler = self.config.scheduler
        num_tokens = max(scheduler.token_budget, scheduler.max_num_seqs, 2)
        self._choices: list[Tensor] = [
            layer.record_choices(num_tokens, self.device) for layer in layers
        ]

    def shape(self) -> tuple[int, int]:
        return len(self._choices), self._choices[0].shape[1]

    def read(self, index: Tensor, hidden_states: Tensor, step: StepRun) -> np.ndarray:
        rows = torch.stack([choices[index] for choices in self._choices], 1)
        return rows.to(torch.int16).cpu().numpy()
