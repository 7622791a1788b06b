"""ModelState: what a model keeps of sequences between steps beside its KV cache, and what its
forward pass takes beside tokens."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import EncoderInput, NewSequence, StepPlan, StepResult


@dataclass(slots=True)
class GroupInputs:
    """One step as one KV group sees it, on the host: R rows, T tokens. `seq_lens` and `slots` may
    be changed in place."""

    seq_lens: np.ndarray
    """[R] int32: keys that each row sees."""
    slots: np.ndarray
    """[T] int64: where each token's key and value go, in cross attention [E] of the encoders'
    tokens; empty where nothing is cached."""
    table: np.ndarray
    """[R, most blocks] int32: block tables; empty where nothing is cached. Not to be changed: the
    next step may use it again."""


@dataclass(slots=True)
class EncoderBatch:
    """The encoder sequences that a step computes, in a flat batch: E tokens."""

    inputs: list[EncoderInput]
    """Of each sequence."""
    input_ids: np.ndarray
    """[E] int64; 0 where a sequence is made of features."""
    positions: np.ndarray
    """[E] int64: each token's index in its sequence."""
    lengths: np.ndarray
    """Of the sequences, int32."""
    row_of_token: np.ndarray
    """[E] int64: its sequence's place among those that the runner holds."""


@dataclass(slots=True)
class StepInputs:
    """One step's flat batch on the host: R rows in the plan's order, T tokens. The arrays are views
    of buffers."""

    plan: StepPlan
    rows: np.ndarray
    """[R] the persistent row of each."""
    input_ids: np.ndarray
    """[T] int64."""
    token_index: np.ndarray
    """[T] int64: each token's index in its sequence. Slots follow from it, and rotary positions,
    unless a ModelState gives others."""
    query_start: np.ndarray
    """[R + 1] int32."""
    starts: np.ndarray
    """[R] int64: tokens that were computed before this step."""
    num_tokens: np.ndarray
    """[R] int64: tokens that are computed in it."""
    groups: list[GroupInputs]
    sampling: np.ndarray
    """Indices into `rows` of those that draw tokens."""
    num_drafts: np.ndarray
    """Of each that draws: the last so many of its tokens are drafts."""
    histories: Any
    """Their tokens: toolkit_lm.sampling.TokenHistory, by persistent row."""
    encoders: EncoderBatch | None = None
    """None: the step computes no encoder sequence."""


class ModelState:
    """One per runner. This base does nothing; `Model.state` names the class that a model needs.
    Methods are called once per step."""

    def __init__(self, model: nn.Module, config: VllmConfig, device: torch.device) -> None:
        self.model = model
        self.config = config
        self.device = device

    def add(self, seq: NewSequence) -> None:
        """A sequence joins the batch: admitted, forked, or back from a preemption. Called once even
        if the state has heard of it before."""

    def remove(self, seq_id: int) -> None:
        """A sequence leaves the batch: ended or preempted. Unknown ones are no error."""

    def groups(self, inputs: StepInputs) -> None:
        """Changes what KV groups see, in place."""

    def inputs(self, inputs: StepInputs) -> dict[str, Tensor]:
        """Arguments of the forward pass, on the device: further ones, or others in place of
        `positions` ([T] or [3, T] int64)."""
        return {}

    def finish(self, inputs: StepInputs, hidden_states: Tensor, result: StepResult) -> None:
        """Adds to a step's result what it makes of its hidden states [T, H]."""


class Drafter(ModelState):
    """Guesses at the tokens to come. The next step keeps those that it draws itself, so that a
    drafter changes no token.

    It is told of sequences by `add` and `remove`, as any ModelState, and asked by `finish`. A
    drafter that raises, or whose drafts are no lists of the model's tokens, is dropped with a
    warning: the engine goes on without drafts. `groups` and `inputs` are not for drafters.
    """

    @abstractmethod
    def propose(self, token_ids: np.ndarray) -> list[int]:
        """Drafts of what follows these tokens, [N] int32, read only: prompt and output of a
        sequence. Empty: no guess."""

    def finish(self, inputs: StepInputs, hidden_states: Tensor, result: StepResult) -> None:
        """Asks for drafts for each sequence that has drawn a token: `result.drafts`, by seq_id.

        `result` is a copy that holds the drawn tokens; nothing but its drafts is read. The arrays
        of `inputs` cannot be written to.
        """
        for place in inputs.sampling:
            if result.token_ids[place]:
                tokens = inputs.histories.tokens(inputs.rows[place])
                result.drafts[inputs.plan.scheduled[place].seq_id] = self.propose(tokens)
