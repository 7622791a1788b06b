"""Outputs of requests, as users get them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from toolkit_lm.params import FinishReason

if TYPE_CHECKING:
    import numpy as np


class Logprob(Struct, gc=False):
    """Log probability of one candidate at one position. Exempt from garbage collection: an answer
    may have millions."""

    logprob: float
    rank: int
    """Rank of the token; 1 is the likeliest."""
    decoded_token: str | None = None


@dataclass(slots=True)
class WeightVersionSpan:
    """Output tokens [start, end), sampled with weights of one version; empty: the checkpoint's."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n sequences, as generated so far."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    """Log probabilities of the token itself and the likeliest ones, by token id, per output
    token."""
    cumulative_logprob: float | None = None
    """Sum of the log probabilities of the tokens, if `logprobs`, `best_of` or a beam search needs
    it."""
    score: float | None = None
    """Score by which the sequences of `best_of` and of a beam search are ranked, highest first."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop text or stop token id that ended the sequence; None for end-of-sequence tokens."""
    weight_versions: list[WeightVersionSpan] | None = None
    """Versions of the weights that sampled a finished sequence. None: it has not ended."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays of plugins' parts for a finished sequence, read-only, by name. Each is an attribute,
    too."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> np.ndarray:
            if name != "arrays" and name in self.arrays:
                return self.arrays[name]
            raise AttributeError(f"a CompletionOutput has no {name!r}", name=name, obj=self)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Arrival time and token times of a request, by time.monotonic(), and the number of tokens. All
    outputs of a request share one."""

    arrival_time: float
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_generation_tokens: int = 0
    num_draft_tokens: int = 0
    """Drafts that were verified, over all sequences."""
    num_accepted_tokens: int = 0
    """Drafts of these that were sampled."""
    drafters: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Both by drafter. Drafts that a grammar forces have none."""


@dataclass(slots=True)
class RequestOutput:
    """Output of a request so far, or what is new of it, by SamplingParams.output_kind."""

    request_id: str
    prompt: str | None
    """The text that the engine read; None if the prompt was a conversation or token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    error: str | None = None
    """Error message, if a sequence's finish_reason is "error"."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Log probabilities of the token itself and the likeliest ones, per prompt token computed so
    far, if requested. None for the first."""
    encoder_prompt: str | None = None
    """The text that the encoder of an encoder-decoder model read. `prompt` and `prompt_token_ids`
    are then the decoder's."""
    encoder_prompt_token_ids: list[int] | None = None
    metrics: RequestMetrics | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt and of the encoder's prompt."""
        return len(self.prompt_token_ids) + len(self.encoder_prompt_token_ids or ())


@dataclass(slots=True)
class PoolingOutput:
    """Result of the model for one prompt, or one pair of texts, with the name that its task gives
    it."""

    data: np.ndarray | None
    """The result, read-only. embed: [D]; token_embed: [tokens, D]; classify: [labels];
    token_classify: [tokens, labels]; score: [1]."""

    @property
    def embedding(self) -> list[float] | None:
        """The vector, for the task embed."""
        return None if self.data is None else self.data.tolist()

    probs = embedding
    """The probability of each label, for the task classify."""

    @property
    def score(self) -> float:
        """The score, for the task score; NaN if there is an error."""
        return float("nan") if self.data is None else float(self.data[0])


@dataclass(slots=True)
class PoolingRequestOutput:
    """Output of a pooling request: `encode`, `embed`, `classify`, `reward` and `score` return
    it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finish_reason: FinishReason | None
    num_cached_tokens: int = 0
    error: str | None = None
    """Error message, if there is no data."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


AnyRequestOutput = RequestOutput | PoolingRequestOutput


@dataclass(slots=True)
class RerankResult:
    """One document in `rerank`'s order."""

    index: int
    """Index of the document in the given list."""
    relevance_score: float
    """Score of the document; NaN if there is an error."""
    document: str | Mapping[str, Any]
    error: str | None = None
