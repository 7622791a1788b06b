"""LogitsProcessor: the contract of logits processors, which plugins add to the sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.config import VllmConfig
from toolkit_lm.sampling.uniform import uniform

Stage = Literal["logits", "probs"]
"""Stage at which a processor works. "logits": on the model's logits, after masks and penalties,
before greedy rows take the likeliest token. "probs": on the probabilities that temperature and
filters leave, of rows that draw at random."""


class ProcessorRow(NamedTuple):
    """One row of the logits, and the sequence that it belongs to."""

    key: int
    """Id of the sequence for its life, whichever row it has in a step."""
    token_ids: np.ndarray
    """All tokens of the sequence, prompt and output: [N] int32, read only. A view, valid until the
    call returns."""
    num_prompt_tokens: int
    seed: int
    num_drafts: int = 0
    """Number of the last tokens that are drafts. They count as drawn here, but may be rejected."""


def uniforms(rows: Sequence[ProcessorRow], stream: int) -> np.ndarray:
    """One number in [0, 1) per row, [R] float64: the same for a sequence's seed and number of
    tokens, whatever else is in the batch.

    `stream`, from 1 on, tells apart numbers that are to be independent of each other; the draw's
    own are stream 0.
    """
    seeds = np.array([row.seed for row in rows], np.uint64)
    return uniform(
        seeds, np.array([len(row.token_ids) - row.num_prompt_tokens for row in rows]), stream
    )


class LogitsProcessor(ABC):
    """The half of a logits processor that works in the sampler, on the sequences that ask for it.

    One instance serves all sequences of a worker, from one thread. What it does to a row must be a
    function of that row's arguments, tokens, random numbers and state, and never of other rows. A
    preempted sequence is removed and added again. An exception fails the request that it was raised
    for, and no other.
    """

    stage: ClassVar[Stage]
    in_logprobs: ClassVar[bool] = False
    """Whether the log probabilities that a request gets are those of the changed logits, after the
    stage "logits". False: they are the model's own."""
    atomic: ClassVar[bool] = False
    """Whether `apply` works in place, fails only before it has changed a value, and makes no NaN or
    infinity. If so, nothing is copied."""

    verifies_drafts: ClassVar[bool] = False
    """Whether one call of `apply` and `begin` may have several rows of a sequence: one after its
    tokens, and one after each of its drafts, in this order. What `apply` does must then follow from
    a row's arguments, tokens and random numbers alone. False, or with `after_draw`: drafts are
    verified one after the other, each when the one before it has been drawn."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self.config = config
        self.device = device

    @abstractmethod
    def add(
        self, row: ProcessorRow, arguments: Mapping[str, Any], state: Mapping[str, float]
    ) -> None:
        """Registers a sequence that joins the batch. `arguments`: the result of its `prepare`.
        `state`: the last result of `after_draw`, empty at first."""

    @abstractmethod
    def remove(self, key: int) -> None:
        """Removes a sequence that leaves the batch: finished, aborted or preempted. Also called if
        `add` raised."""

    def begin(self, rows: Sequence[ProcessorRow]) -> None:  # noqa: B027 # most have nothing to do
        """A step is computed that draws for these rows: what can be made ready meanwhile, threads
        may do. Their drafts may follow."""

    @abstractmethod
    def apply(self, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        """The changed logits or probabilities [R, V] float32 of these rows. Changing them in place
        is fine.

        Minus infinity, or 0, rules a token out. Probabilities add up to 1 when they come, and need
        not when they are returned.
        """

    def after_draw(
        self, row: ProcessorRow, token_id: int, prob: float
    ) -> Mapping[str, float] | None:
        """A token was drawn for a row that `apply` has worked on. `prob`: what it was drawn with,
        after all steps; 1 for a greedy row.

        Returns what is to survive a preemption, and None where nothing is.
        """
        return None

    def drafts(self, row: ProcessorRow) -> list[int]:
        """Tokens that must follow, asked when a step has drawn: the next one computes them
        together, and draws each as any other."""
        return []

    def num_allowed(self, row: ProcessorRow, drafts: Sequence[int]) -> int:
        """Number of drafts, from the first, that may be drawn after the row's tokens. Those behind
        them are dropped before they cost a step anything. Called after `drafts`."""
        return len(drafts)
