"""The contract of drafters that read tokens."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from torch import Tensor

from toolkit_lm.messages import StepResult
from toolkit_lm.step.inputs import StepInputs
from toolkit_lm.step.part import StepPart, StepRun


class Drafter(StepPart):
    """Guesses at the tokens to come. The next step keeps those that it draws itself, so that a
    drafter changes no token.

    It is told of sequences by `add` and `remove`, as any StepPart, and asked by `finish`. A drafter
    that raises, or whose drafts are no lists of the model's tokens, is dropped with a warning: the
    engine goes on without drafts. `groups` and `inputs` are not for drafters.
    """

    ranks = "last_stage"

    @abstractmethod
    def propose(self, token_ids: np.ndarray) -> list[int]:
        """Drafts of what follows these tokens, [N] int32, read only: prompt and output of a
        sequence. Empty: no guess."""

    def finish(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
    ) -> None:
        """Asks for drafts for each sequence that has drawn a token: `result.drafts`, by seq_id.

        `result` is a copy that holds the drawn tokens; nothing but its drafts is read. The arrays
        of `inputs` cannot be written to.
        """
        for place in inputs.sampling:
            if result.token_ids[place]:
                tokens = inputs.histories.tokens(inputs.rows[place])
                result.drafts[inputs.plan.scheduled[place].seq_id] = self.propose(tokens)
