"""Request and Sequence: what the scheduler knows of the work."""

from __future__ import annotations

import secrets
from itertools import count

from toolkit_lm.messages import Candidates, EngineRequest
from toolkit_lm.params import FinishReason
from toolkit_lm.scheduler.beam import Beam, BeamSearch
from toolkit_lm.scheduler.prefix import PrefixHashes

_SEED_STRIDE = 0x9E3779B97F4A7C15


class Sequence:
    """One of a request's continuations: what is computed so far, and what is wanted.

    A token that a running step will draw is a placeholder until `Scheduler.update`: it counts, but has no id yet.
    """

    __slots__ = (
        "candidates",
        "finish_reason",
        "hashes",
        "index",
        "logprob",
        "mirostat_mu",
        "num_computed_tokens",
        "num_placeholders",
        "on_worker",
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
        self.on_worker = False
        """The runner holds it: a plan has made it known, and none has dropped it."""
        self.mirostat_mu: float | None = None
        """Where its last draw left mirostat, for when it comes back from a preemption."""
        self.finish_reason: FinishReason | None = None
        self.hashes = PrefixHashes(request.root_hash)
        self.logprob = 0.0
        """Of a beam: the sum over its output."""
        self.candidates: Candidates | None = None
        """Of a beam: what its next token may be, until all beams of the request know. Meanwhile that token is a placeholder."""

    def extended(self, seq_id: int, token_id: int, logprob: float) -> Sequence:
        """A beam that goes on from this one; `logprob` is the sum over its output."""
        beam = Sequence(self.request, self.index, seq_id, self.seed)
        beam.token_ids = [*self.token_ids, token_id]
        beam.num_computed_tokens = self.num_computed_tokens
        beam.hashes = self.hashes.fork()
        beam.logprob = logprob
        return beam

    @property
    def beam(self) -> Beam:
        return Beam(self.token_ids[self.request.num_prompt_tokens :], self.logprob)

    def block_hashes(self, block_size: int, num_blocks: int) -> list[bytes]:
        """At least the first `num_blocks` hashes of its full blocks."""
        return self.hashes.block_hashes(self.token_ids, block_size, num_blocks)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_pending_tokens(self) -> int:
        """Tokens still to compute."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Those that are known."""
        return len(self.token_ids) - self.request.num_prompt_tokens


class Request:
    """A group of sequences over one prompt. It is admitted and preempted whole."""

    def __init__(
        self, message: EngineRequest, max_tokens: int, ids: count[int], root_hash: bytes = b"", default_seed: int | None = None
    ) -> None:
        self.request_id = message.request_id
        self.prompt_token_ids = message.prompt_token_ids
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.params = message.params
        self.words = message.words
        self.priority = message.priority
        self.arrival_time = message.arrival_time
        self.deadline = message.deadline
        self.context = message.context
        self.pooling = message.pooling
        """Set: its prompt is pooled, and no token is drawn."""
        self.second_text_start = message.second_text_start
        self.pooling_start = message.pooling_start
        self.num_attended = message.num_attended
        self.root_hash = root_hash
        """What the hashes of its blocks begin with."""
        self.swapped = False
        """Its blocks are in the host pool."""
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
        self.search = self._search()
        """Set for a beam search: its sequences are then the beams, which a step replaces; there is one at first."""
        num_sequences = 1 if self.search else message.params.num_sequences
        # Each sequence draws from its own stream; the same seed gives the same continuations.
        self.sequences = [Sequence(self, i, next(ids), (base + i * _SEED_STRIDE) % 2**64) for i in range(num_sequences)]
        self.unfinished = self.sequences
        """Those of them that have not ended. It is replaced, and never changed."""
        self.number = self.sequences[0].seq_id
        """Requests are numbered as they come."""

    def _search(self) -> BeamSearch | None:
        params = self.params
        if not params.use_beam_search:
            return None
        return BeamSearch(
            params.num_sequences,
            self.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            end_token_ids=self.eos_token_ids | self.stop_token_ids,
        )

    @property
    def seq_ids(self) -> list[int]:
        """Of the unfinished sequences."""
        return [seq.seq_id for seq in self.unfinished]

    @property
    def num_rows(self) -> int:
        """Most rows of the batch that it takes from now on."""
        return self.search.width if self.search else len(self.unfinished)

    @property
    def leader(self) -> Sequence:
        """The sequence that computes the prompt; the others fork from it."""
        return self.unfinished[0]

    @property
    def num_output_tokens(self) -> int:
        if self.search:
            return sum(len(hypothesis.token_ids) for hypothesis in self.search.hypotheses[: self.params.n])
        return sum(s.num_output_tokens for s in self.sequences)
