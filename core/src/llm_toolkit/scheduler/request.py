"""Request and Sequence: what the scheduler knows of the work."""

from __future__ import annotations

import secrets
from itertools import count

from llm_toolkit.messages import EngineRequest, FinishReason

_SEED_STRIDE = 0x9E3779B97F4A7C15


class Sequence:
    """One of a request's n continuations: what is computed so far, and what is wanted.

    A token that a running step will draw is a placeholder until `Scheduler.update`: it counts, but has no id yet.
    """

    __slots__ = (
        "finish_reason",
        "held",
        "index",
        "mirostat_mu",
        "num_computed_tokens",
        "num_placeholders",
        "request",
        "seed",
        "seq_id",
        "token_ids",
    )

    def __init__(self, request: Request, index: int, seq_id: int, seed: int) -> None:
        self.request = request
        self.index = index
        self.seq_id = seq_id
        self.seed = seed
        self.token_ids = list(request.prompt_token_ids)
        self.num_computed_tokens = 0
        """Tokens whose keys and values are in the cache, those of the running step included."""
        self.num_placeholders = 0
        self.held = False
        """The runner holds it: a plan has made it known, and none has dropped it."""
        self.mirostat_mu: float | None = None
        """Where its last draw left mirostat, for when it comes back from a preemption."""
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_pending_tokens(self) -> int:
        """Tokens still to compute."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens


class Request:
    """A group of sequences over one prompt. It is admitted and preempted whole."""

    def __init__(self, message: EngineRequest, max_tokens: int, ids: count[int], default_seed: int | None = None) -> None:
        self.request_id = message.request_id
        self.prompt_token_ids = message.prompt_token_ids
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.params = message.params
        self.words = message.words
        self.priority = message.priority
        self.arrival_time = message.arrival_time
        self.max_tokens = max_tokens
        """Output tokens per sequence: what was asked, or what max_model_len leaves room for."""
        self.eos_token_ids = frozenset(() if message.params.ignore_eos else message.eos_token_ids)
        self.stop_token_ids = frozenset(message.params.stop_token_ids or ())
        self.num_cached_tokens = 0
        self.num_prompt_logprobs = 0
        """Prompt tokens whose log probabilities were returned."""
        self.scheduled_time: float | None = None
        self.first_token_time: float | None = None
        seed = message.params.seed if message.params.seed is not None else default_seed
        base = secrets.randbits(63) if seed is None else seed
        # Each sequence draws from its own stream; the same seed gives the same n continuations.
        self.sequences = [Sequence(self, i, next(ids), (base + i * _SEED_STRIDE) % 2**64) for i in range(message.params.n)]

    @property
    def unfinished(self) -> list[Sequence]:
        return [s for s in self.sequences if s.finish_reason is None]

    @property
    def leader(self) -> Sequence:
        """The sequence that computes the prompt; the others fork from it."""
        return next(s for s in self.sequences if s.finish_reason is None)

    @property
    def num_output_tokens(self) -> int:
        return sum(s.num_output_tokens for s in self.sequences)
