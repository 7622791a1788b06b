"""What happened, for plugins that watch: the argument of the hook `toolkit_event`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from toolkit_lm.params import FinishReason

RequestEventKind = Literal["queued", "scheduled", "first_token", "preempted", "finished", "aborted"]

Wait = Literal[
    "queue", "batch", "tokens", "blocks", "media", "part", "loading", "drawing", "policy"
]
WAITS: dict[Wait, str] = {
    "queue": "its turn has not come",
    "batch": "the batch has no free row (max_num_seqs)",
    "tokens": "the step has too few tokens left (max_num_batched_tokens)",
    "blocks": "too few KV blocks are free",
    "media": "the cache of media embeddings is full",
    "part": "a part of the step has no room",
    "loading": "its keys and values are being loaded",
    "drawing": "a token of it is still being drawn",
    "policy": "the scheduling policy holds it back",
}
"""Each reason for which requests wait, as a sentence."""


class RequestEvent(Struct, frozen=True, kw_only=True, tag="request"):
    """A step in one request's life. Times are time.monotonic() seconds, which the processes of a
    machine share."""

    kind: RequestEventKind
    """The last is "finished", or "aborted" when the caller or its deadline ended the request."""
    request_id: str
    time: float
    arrival_time: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    """Over all sequences of the request; final when kind is "finished" or "aborted"."""
    num_sequences: int = 1
    scheduled_time: float | None = None
    """When the request first entered a batch."""
    first_token_time: float | None = None
    finish_reason: FinishReason | None = None
    """Of the sequence that ended last."""
    waited_for: str | None = None
    """Why it waits, or waited last: a sentence of `WAITS`, or what a part says, with its name."""
    context: dict[str, str] = field(default_factory=dict)
    """What the caller attached to the request, such as its trace headers."""
    engine: int = 0
    """Which of several engines."""


class StepEvent(Struct, frozen=True, kw_only=True, tag="step"):
    """One step of the engine, after it."""

    time: float
    duration: float
    """Seconds from planning to results."""
    num_tokens: int
    """Tokens computed in the step."""
    num_output_tokens: int = 0
    """Tokens that sequences got of it."""
    num_output_sequences: int = 0
    """Those that got some."""
    num_compilations: int = 0
    """Graphs that torch compiled in the step, in any thread of the process. All is to be compiled
    before the first request."""
    engine: int = 0


class LoadEvent(Struct, frozen=True, kw_only=True, tag="load"):
    """How full the engine is, after a step or after requests have come or gone between steps."""

    time: float
    num_running: int
    """Sequences in the batch."""
    num_waiting: int
    """Requests without a place in the batch."""
    waiting_by_reason: dict[Wait, int] = field(default_factory=dict)
    """The same, by why they waited when they were last asked; reasons that hold up nobody are left
    out."""
    num_used_blocks: int
    num_total_blocks: int
    num_cached_blocks: int = 0
    """Free blocks whose contents a prompt with the same prefix would find."""
    num_used_host_blocks: int = 0
    """Of the pool that preempted requests are swapped to."""
    num_total_host_blocks: int = 0
    engine: int = 0


Event = RequestEvent | StepEvent | LoadEvent
