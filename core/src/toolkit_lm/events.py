"""Events: the arguments of the hook `toolkit_event`."""

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
    "blocks": "too few KV blocks are free (num_kv_blocks, kv_cache_memory)",
    "media": "the cache of media embeddings is full (encoder_cache_memory)",
    "part": "a part of the step has no room",
    "loading": "its keys and values are being loaded",
    "drawing": "a token of it is still being drawn",
    "policy": "the scheduling policy holds it back (scheduling_policy)",
}
"""Each reason for which requests wait, as a sentence. Parentheses name the options that change
it."""


class RequestEvent(Struct, frozen=True, kw_only=True, tag="request"):
    """A change in one request's life. Times are time.monotonic() seconds, which the processes of a
    machine share."""

    kind: RequestEventKind
    """Kind of event. The last one is "finished", or "aborted" if the caller or the deadline ended
    the request."""
    request_id: str
    time: float
    arrival_time: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    """Output tokens over all sequences of the request; final when kind is "finished" or
    "aborted"."""
    num_sequences: int = 1
    scheduled_time: float | None = None
    """Time at which the request was first scheduled."""
    first_token_time: float | None = None
    finish_reason: FinishReason | None = None
    """Finish reason of the sequence that ended last."""
    waited_for: str | None = None
    """Reason for which the request waits, or waited last: a sentence of `WAITS`, or a part's name
    and text."""
    context: dict[str, str] = field(default_factory=dict)
    """Values that the caller attached to the request, such as its trace headers."""
    engine: int = 0
    """Number of the engine, if there are several."""


class StepEvent(Struct, frozen=True, kw_only=True, tag="step"):
    """One step of the engine, after it."""

    time: float
    duration: float
    """Seconds from planning to results."""
    num_tokens: int
    """Tokens computed in the step."""
    num_output_tokens: int = 0
    """Tokens that the step added to sequences."""
    num_output_sequences: int = 0
    """Number of sequences that got tokens."""
    drafts: list[tuple[int, int]] = []
    """For each sequence with drafts: the number of drafts, and how many of them were accepted."""
    drafters: list[tuple[str, int, int]] = []
    """The same by drafter: its name first. A sequence may have drafts of several, or of none."""
    num_compilations: int = 0
    """Graphs that torch compiled in the step, in any thread of the process. All should be compiled
    before the first request."""
    engine: int = 0


class LoadEvent(Struct, frozen=True, kw_only=True, tag="load"):
    """Load of the engine, after a step or after requests have come or gone between steps."""

    time: float
    num_running: int
    """Sequences in the batch."""
    num_waiting: int
    """Requests in the queue."""
    waiting_by_reason: dict[Wait, int] = field(default_factory=dict)
    """Requests in the queue, by the reason of their last refusal. Reasons without a request are
    left out."""
    num_used_blocks: int
    num_total_blocks: int
    num_cached_blocks: int = 0
    """Free blocks whose contents a prompt with the same prefix would find."""
    num_used_host_blocks: int = 0
    """Used blocks of the host pool for preempted requests."""
    num_total_host_blocks: int = 0
    engine: int = 0


Event = RequestEvent | StepEvent | LoadEvent
