"""One step's flat batch on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit_lm.messages import StepPlan


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

    positions: np.ndarray
    """[E] int64: each token's index in its sequence."""
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
    unless a StepPart gives others."""
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
    spans: np.ndarray | None = None
    """[T, 2] int32: of each token, the run of tokens [begin, end) of its sequence that see one
    another, such as a picture's; most are alone. None: all are."""
