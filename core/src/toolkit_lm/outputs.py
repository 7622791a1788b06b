"""What a user gets back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from toolkit_lm.params import FinishReason

if TYPE_CHECKING:
    import numpy as np


class Logprob(Struct, gc=False):
    """The log probability of one candidate at one position. The garbage collector need not look at
    it: an answer may have millions."""

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
    """The sum over its tokens, where `logprobs`, `best_of` or a beam search needs it."""
    score: float | None = None
    """What the sequences of `best_of` and of a beam search are ranked by, the highest first."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop text or stop token id that ended the sequence; None for end-of-sequence tokens."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When a request came and its tokens did, by time.monotonic(), and how many there are. All
    outputs of a request share one."""

    arrival_time: float
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_generation_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request as far as it has come, or what is new of it: SamplingParams.output_kind says
    which."""

    request_id: str
    prompt: str | None
    """The text that the engine read; None where the prompt was a conversation or token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    error: str | None = None
    """What went wrong, when a sequence's finish_reason is "error"."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per prompt token so far computed, where asked for: the token itself and the likeliest ones.
    None for the first."""
    encoder_prompt: str | None = None
    """Of an encoder-decoder model, whose `prompt` and `prompt_token_ids` are the decoder's: the
    text that its encoder read."""
    encoder_prompt_token_ids: list[int] | None = None
    metrics: RequestMetrics | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Those of the prompt, and of the encoder's."""
        return len(self.prompt_token_ids) + len(self.encoder_prompt_token_ids or ())


@dataclass(slots=True)
class PoolingOutput:
    """What the model made of one prompt, or of one pair of texts, and what it is called by its
    task."""

    data: np.ndarray | None
    """Read-only. embed: [D]; token_embed: [tokens, D]; classify: [labels]; token_classify: [tokens,
    labels]; score: [1]."""

    @property
    def embedding(self) -> list[float] | None:
        """Of embed: the vector."""
        return None if self.data is None else self.data.tolist()

    probs = embedding
    """Of classify: the probability of each label."""

    @property
    def score(self) -> float:
        """Of score; NaN where there is an error."""
        return float("nan") if self.data is None else float(self.data[0])


@dataclass(slots=True)
class PoolingRequestOutput:
    """A pooling request: what `encode`, `embed`, `classify`, `reward` and `score` give."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finish_reason: FinishReason | None
    num_cached_tokens: int = 0
    error: str | None = None
    """What went wrong, when there is no data."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


AnyRequestOutput = RequestOutput | PoolingRequestOutput


@dataclass(slots=True)
class RerankResult:
    """One document in `rerank`'s order."""

    index: int
    """Its place in the list that was given."""
    relevance_score: float
    """NaN where there is an error."""
    document: str
    error: str | None = None
