"""What a user gets back."""

from __future__ import annotations

from dataclasses import dataclass

from llm_toolkit.messages import FinishReason


@dataclass(slots=True)
class Logprob:
    """The log probability of one candidate at one position."""

    logprob: float
    rank: int
    """1 for the likeliest token."""
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n sequences, as far as it has come."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    """Per output token: the token itself and the likeliest ones, by token id."""
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop text or stop token id that ended the sequence; None for end-of-sequence tokens."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request as far as it has come: whole texts, not deltas."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    error: str | None = None
    """What went wrong, when a sequence's finish_reason is "error"."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per prompt token so far computed, where asked for: the token itself and the likeliest ones. None for the first."""
