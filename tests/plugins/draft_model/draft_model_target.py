"""Target of the entry module."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from toolkit_lm.attention import CacheLayer
from toolkit_lm.config import Checkpoint, VllmConfig
from toolkit_lm.messages import StepResult
from toolkit_lm.model import load_model
from toolkit_lm.step import Drafter, StepInputs, StepRun
from torch import Tensor, nn


class DraftModel(Drafter):
    """Computes each step's tokens again with the small model, then goes on alone from what was
    drawn.

    Its layers have a KV group of their own, in which the engine caches prefixes, preempts and swaps
    as in the others. What a step drafts in vain, the next one writes over.
    """

    def __init__(self, model: nn.Module, config: VllmConfig, device: torch.device, **own: Any):
        super().__init__(model, config, device, **own)
        folder = Path(self.options.checkpoint)
        hf_config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        [name] = hf_config["architectures"]
        # The last stage has the whole of it.
        rank = config.parallel.tensor_parallel_rank
        alone = replace(config.parallel, pipeline_parallel_size=1, rank=rank)
        checkpoint = Checkpoint(path=str(folder), architecture=name, hf_config=hf_config)
        self.small = load_model(
            self.plugins.models.load(name),
            replace(config.with_checkpoint(checkpoint), parallel=alone),
            device,
            self.plugins,
            prefix="drafter/small",
        )
        self.lookahead = self.options.drafts

    def layers(self) -> Mapping[str, CacheLayer]:
        return {
            layer.prefix: layer for layer in self.small.modules() if isinstance(layer, CacheLayer)
        }

    def propose(self, token_ids: np.ndarray) -> list[int]:
        return []

    def finish(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
    ) -> None:
        """Each row's tokens, with those that it has drawn; then one token after the other."""
        histories = inputs.histories
        known = histories.num_tokens[inputs.rows]
        ends = inputs.starts + inputs.num_tokens
        drawing = np.array([bool(drawn) for drawn in result.token_ids])
        ends[drawing] = known[drawing]
        tokens = [
            histories.token_ids[row, start:end]
            for row, start, end in zip(inputs.rows, inputs.starts, ends, strict=True)
        ]
        out = self._forward(step, np.arange(len(ends)), tokens, inputs.starts)
        lasts = (ends - inputs.starts).cumsum() - 1
        rows = np.flatnonzero(drawing)
        drafts = np.zeros((len(rows), 0), np.int64)
        hidden = out[torch.from_numpy(lasts[rows])]
        for ahead in range(self.options.drafts):
            # A draft is of use where the token after it can be drawn too.
            going = known[rows] + ahead + 1 < self.config.max_model_len
            if not going.all():
                self._give(inputs, result, rows[~going], drafts[~going])
                rows, drafts = rows[going], drafts[going]
                hidden = hidden[torch.from_numpy(going)]
            if not len(rows):
                return
            drawn = step.draw(self.small.compute_logits(hidden), rows, ahead, drafts)
            drafts = np.concatenate((drafts, drawn[:, None]), axis=1)
            if ahead + 1 < self.options.drafts:
                hidden = self._forward(step, rows, drawn[:, None], known[rows] + ahead)
        self._give(inputs, result, rows, drafts)

    def _forward(
        self, step: StepRun, rows: np.ndarray, tokens: Sequence[np.ndarray], start: np.ndarray
    ) -> Tensor:
        given = {}
        if self.options.shares_embedding:
            flat = torch.from_numpy(np.concatenate(tokens).astype(np.int64))
            given["inputs_embeds"] = self.model.embed_input_ids(flat.to(self.device))
        return step.forward(self.small, rows, tokens, start, **given)

    def _give(
        self, inputs: StepInputs, result: StepResult, rows: np.ndarray, drafts: np.ndarray
    ) -> None:
        for row, some in zip(rows, drafts, strict=True):
            result.drafts[inputs.plan.scheduled[row].seq_id] = some.tolist()
