"""A drafter that loads the model's own checkpoint once more. It shows what a drafter with layers
needs, and gains nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from toolkit_lm.attention import CacheLayer
from toolkit_lm.messages import StepResult
from toolkit_lm.model import load_model
from toolkit_lm.step import Drafter, StepInputs, StepRun
from torch import Tensor

DRAFTS = 2


class ShadowDrafter(Drafter):
    """Continues each sequence by two tokens."""

    lookahead = DRAFTS
    follows_decodes = False

    def __init__(self, model, config, device, **own) -> None:
        super().__init__(model, config, device, **own)
        kind = self.plugins.models.load(config.checkpoint.architecture)
        self._small = load_model(kind, config, device, self.plugins, prefix="drafter/shadow")
        self._filled: dict[int, int] = {}
        """Entries in the KV cache by seq_id. Unknown: those of all tokens before the step."""

    def layers(self) -> Mapping[str, CacheLayer]:
        found = (module for module in self._small.modules() if isinstance(module, CacheLayer))
        return {layer.prefix: layer for layer in found}

    def propose(self, token_ids: np.ndarray) -> list[int]:
        return []

    def remove(self, seq_id: int) -> None:
        self._filled.pop(seq_id, None)

    def follow(self, inputs: StepInputs, hidden_states: Tensor, step: StepRun) -> None:
        self._read(inputs, step)

    def finish(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
    ) -> None:
        hidden, ends = self._read(inputs, step)
        most = np.zeros(len(ends), np.int64)
        most[inputs.sampling] = np.minimum(inputs.max_drafts, DRAFTS)
        most[[not drawn for drawn in result.token_ids]] = 0
        known = inputs.histories.num_tokens[inputs.rows]
        most = np.minimum(most, self.config.max_model_len - 1 - known)
        rows = np.flatnonzero(most > 0)
        drafts = np.zeros((len(rows), 0), np.int64)
        last = hidden[ends[rows] - 1]
        for ahead in range(DRAFTS):
            going = most[rows] > ahead
            rows, drafts, last = rows[going], drafts[going], last[going.nonzero()[0]]
            if not len(rows):
                return
            drawn = step.draw(self._small.compute_logits(last), rows, ahead, drafts)
            drafts = np.concatenate((drafts, drawn[:, None]), axis=1)
            for row, tokens in zip(rows, drafts.tolist(), strict=True):
                result.drafts[inputs.plan.scheduled[row].seq_id] = tokens
            if ahead + 1 < DRAFTS:
                last = step.forward(self._small, rows, list(drafts[:, -1:]), known[rows] + ahead)

    def _read(self, inputs: StepInputs, step: StepRun) -> tuple[Tensor, np.ndarray]:
        """Computes the tokens of all rows that it has not seen. Returns hidden states, and the end
        of each row's."""
        tokens = []
        start = np.zeros(len(inputs.rows), np.int64)
        for index, (row, scheduled) in enumerate(
            zip(inputs.rows, inputs.plan.scheduled, strict=True)
        ):
            # Rejected drafts are overwritten.
            known = inputs.histories.tokens(row)[: scheduled.start + scheduled.num_tokens + 1]
            begin = min(self._filled.get(scheduled.seq_id, scheduled.start), scheduled.start)
            start[index] = begin
            tokens.append(known[begin:])
            self._filled[scheduled.seq_id] = len(known)
        hidden = step.forward(self._small, np.arange(len(start)), tokens, start)
        return hidden, np.cumsum([len(some) for some in tokens])
