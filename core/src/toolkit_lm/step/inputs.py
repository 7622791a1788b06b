"""One step's flat batch on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from toolkit_lm.messages import StepPlan


@dataclass(slots=True)
class GroupInputs:
    """One step as one KV group sees it, on the host: R rows, T tokens. `seq_lens` and `slots` may
    be changed in place."""

    seq_lens: np.ndarray
    """[R] int32: number of keys that each row sees."""
    slots: np.ndarray
    """[T] int64: slot of each token's key and value. In cross attention [E], for the encoders'
    tokens. Empty if nothing is cached."""
    table: np.ndarray
    """[R, most blocks] int32: block tables; empty if nothing is cached. Read-only: the next step
    may reuse it."""


@dataclass(slots=True)
class EncoderBatch:
    """Flat batch of the encoder sequences that a step computes: E tokens."""

    positions: np.ndarray
    """[E] int64: each token's index in its sequence."""
    row_of_token: np.ndarray
    """[E] int64: index of the token's sequence among those that the runner holds."""


@dataclass(slots=True)
class StepInputs:
    """One step's flat batch on the host: R rows in the plan's order, T tokens. The arrays are views
    of buffers."""

    plan: StepPlan
    rows: np.ndarray
    """[R] row of each sequence in the persistent batch."""
    input_ids: np.ndarray
    """[T] int64: token ids."""
    token_index: np.ndarray
    """[T] int64: each token's index in its sequence. Slots follow from it, and rotary positions,
    unless a StepPart gives others."""
    query_start: np.ndarray
    """[R + 1] int32: start of each row's tokens in the flat batch, and the end."""
    starts: np.ndarray
    """[R] int64: number of each row's tokens computed before this step."""
    num_tokens: np.ndarray
    """[R] int64: number of each row's tokens computed in this step."""
    groups: list[GroupInputs]
    sampling: np.ndarray
    """Indices into `rows` of the rows that sample tokens."""
    num_drafts: np.ndarray
    """Number of drafts at the end of each sampling row's tokens."""
    histories: Any
    """Token histories of the persistent rows: a toolkit_lm.sampling.TokenHistory."""
    max_drafts: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int64))
    """[S] most drafts of each sampling row that the next step verifies, for drafters. 0: none."""
    encoders: EncoderBatch | None = None
    """Encoder sequences that the step computes; None: there are none."""
    spans: np.ndarray | None = None
    """[T, 2] int32: for each token, the span [begin, end) of tokens of its sequence that attend to
    one another, such as those of an image. Most spans are one token. None: all are."""
