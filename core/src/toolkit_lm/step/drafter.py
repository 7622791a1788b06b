"""The contract of drafters that read tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import StepResult
from toolkit_lm.plugin import Plugins
from toolkit_lm.step.inputs import StepInputs
from toolkit_lm.step.part import StepPart, StepRun

StepTime = tuple[int, int, float]
"""A measured decode step: rows, drafts of each row, seconds. -1 drafts: no drafter was asked."""


class Drafter(StepPart):
    """Proposes draft tokens. The next step keeps those that it samples itself, so a drafter changes
    no token.

    `add` and `remove` announce sequences, as for any StepPart, and `finish` asks for drafts. A
    drafter that raises, or that returns anything but lists of the model's tokens, is dropped with a
    warning. The engine then continues without it. Drafters do not use `groups` and `inputs`.

    Of several drafters, each row takes the drafts of the one whose expected number of accepted
    drafts is largest, by `acceptance`. The others may `extend` them.
    """

    ranks = "last_stage"
    rests: ClassVar[bool] = True
    """Steps may go by without `finish`, where drafts do not pay. `follow` is then called."""
    follows_decodes: bool = True
    """`follow` is also called in steps that compute one token of each sequence that is known. Read
    in each step: with several ranks, the same on all."""

    def known_steps(self) -> list[StepTime]:
        """Decode steps that an earlier start has measured on this machine, with this config. They
        are not measured again. Only the first drafter of a chain is asked."""
        return []

    def keep_steps(self, steps: Sequence[StepTime]) -> None:
        """Keeps measured steps for later starts. Only called if measuring has taken long."""

    @classmethod
    def describe(
        cls, model: nn.Module, config: VllmConfig, *, plugins: Plugins, options: Any
    ) -> list[str]:
        """Returns lines for `toolkit explain`: what the drafter holds, and what it costs. `model`
        is on the device "meta". No weight is read. Other arguments as of the constructor."""
        return []

    @abstractmethod
    def propose(self, token_ids: np.ndarray) -> list[int]:
        """Returns drafts that follow these tokens, [N] int32, read only: prompt and output of a
        sequence. Empty: no drafts."""

    def extend(self, seq_id: int, token_ids: np.ndarray, num_drafts: int) -> list[int]:
        """Returns drafts that follow drafts of another drafter: the last `num_drafts` of these
        tokens, [N] int32, read only. Only called if there are several drafters. By default,
        `propose` of all tokens."""
        return self.propose(token_ids)

    def acceptance(self, seq_id: int, drafts: Sequence[int]) -> Sequence[float] | None:
        """Returns the probability that each of the drafts just returned is accepted, if those
        before it are. None: unknown. The engine compares several drafters by it, and corrects it by
        what it observes. Only called if there are several."""
        return None

    def follow(self, inputs: StepInputs, hidden_states: Tensor, step: StepRun) -> None:
        """Called in place of `finish` in steps that ask for no drafts."""

    def finish(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
    ) -> None:
        """Sets `result.drafts`, by seq_id, for each sequence that has sampled a token.

        `result` is a copy with the sampled tokens; only its drafts are read back. The arrays of
        `inputs` are read-only. Drafts beyond `inputs.max_drafts` are dropped: do not compute them.
        """
        for place, most in zip(inputs.sampling, inputs.max_drafts, strict=True):
            if most and result.token_ids[place]:
                tokens = inputs.histories.tokens(inputs.rows[place])
                result.drafts[inputs.plan.scheduled[place].seq_id] = self.propose(tokens)
