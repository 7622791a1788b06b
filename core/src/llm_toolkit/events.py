"""What happened, for plugins that watch: the argument of the hook `toolkit_event`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from llm_toolkit.messages import FinishReason

RequestEventKind = Literal["queued", "scheduled", "first_token", "preempted", "finished"]


class RequestEvent(Struct, frozen=True, kw_only=True):
    """A step in one request's life. Times are time.monotonic() seconds."""

    kind: RequestEventKind
    request_id: str
    time: float
    arrival_time: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    """Over all sequences of the request; final when kind is "finished"."""
    num_sequences: int = 1
    scheduled_time: float | None = None
    """When the request first entered a batch."""
    first_token_time: float | None = None
    finish_reason: FinishReason | None = None
    """Of the sequence that ended last."""


class StepEvent(Struct, frozen=True, kw_only=True):
    """One step of the engine, after it."""

    time: float
    duration: float
    """Seconds from planning to results."""
    num_tokens: int
    """Tokens computed in the step."""


class LoadEvent(Struct, frozen=True, kw_only=True):
    """How full the engine is, after a step or after requests have come or gone between steps."""

    time: float
    num_running: int
    """Sequences in the batch."""
    num_waiting: int
    """Requests without a place in the batch."""
    num_used_blocks: int
    num_total_blocks: int


Event = RequestEvent | StepEvent | LoadEvent
