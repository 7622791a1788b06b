"""Request and Sequence: the scheduler's state of a request."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import NamedTuple

from msgspec import structs

from toolkit_lm.events import WAITS, Wait
from toolkit_lm.kv.group_blocks import TokenRange
from toolkit_lm.kv.prefix import PrefixHashes
from toolkit_lm.messages import (
    Array,
    Candidates,
    EngineOutput,
    EngineRequest,
    NewSequence,
    SamplerState,
    ScheduledSequence,
    TokenLogprobs,
)
from toolkit_lm.params import FinishReason
from toolkit_lm.scheduler.beam import Beam, BeamSearch
from toolkit_lm.scheduler.encoder import Encoder, over_prompt
from toolkit_lm.scheduler.rules import RequestRules

_SEED_STRIDE = 0x9E3779B97F4A7C15


class Sequence:
    """One continuation of a request: its tokens, and how many of them are computed.

    A token that a running step will sample is a placeholder until `Scheduler.update`: it counts,
    but has no id yet.
    """

    __slots__ = (
        "_hashes",
        "arrays",
        "candidates",
        "drafts",
        "finish_reason",
        "index",
        "logprob",
        "num_computed_tokens",
        "num_placeholders",
        "on_worker",
        "request",
        "sampler_state",
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
        """Number of tokens whose keys and values are in the cache, the running step's included."""
        self.num_placeholders = 0
        self.drafts: list[int] = []
        """Draft tokens. The next step computes as many as fit, and keeps those that it samples."""
        self.on_worker = False
        """The runner holds the sequence: a plan has added it, and none has dropped it."""
        self.sampler_state: SamplerState = {}
        """Sampler state to restore when the sequence resumes after a preemption."""
        self.finish_reason: FinishReason | None = None
        self._hashes: PrefixHashes | None = None
        """Block hashes of the sequence. None until it has a full block."""
        self.logprob = 0.0
        """Sum of the log probabilities of a beam's output."""
        self.arrays: dict[str, Callable[[Sequence], Array]] = {}
        """Arrays of planners that the last output takes along, by name. Each is made when the
        sequence ends."""
        self.candidates: Candidates | None = None
        """A beam's candidates for its next token, until all beams of the request have theirs.
        Meanwhile that token is a placeholder."""

    def append_sampled(self, tokens: list[int], drafts: list[int]) -> FinishReason | None:
        """Replaces a placeholder with the tokens that a step sampled, up to the token that ends the
        sequence.

        `drafts`: guesses of the following tokens. Returns the finish reason; None if the sequence
        continues.
        """
        self.num_placeholders -= 1
        request = self.request
        for token in tokens:
            self.token_ids.append(token)
            if token in request.end_token_ids:
                return "stop"
            if len(self.token_ids) >= request.most_tokens:
                return "length"
        # Keys and values of rejected drafts are overwritten later.
        self.num_computed_tokens = min(
            self.num_computed_tokens, len(self.token_ids) + self.num_placeholders - 1
        )
        if drafts and not self.num_placeholders:
            # The last token of all is sampled, but never computed.
            fitting = drafts[
                : min(request.max_drafts, request.most_tokens - len(self.token_ids) - 1)
            ]
            # A token that ends the sequence is valid: an error of a later draft must not count.
            self.drafts = list(takewhile(lambda token: token not in request.end_token_ids, fitting))
        return None

    def output(
        self,
        finish_reason: FinishReason | None,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        prompt_logprobs: list[TokenLogprobs],
        pooled: Array | None = None,
        error: str | None = None,
    ) -> EngineOutput:
        """Makes the output of a step for this sequence."""
        return EngineOutput(
            request_id=self.request.request_id,
            index=self.index,
            token_ids=token_ids,
            logprobs=logprobs or None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_token_id=token_ids[-1]
            if token_ids and token_ids[-1] in self.request.stop_token_ids
            else None,
            num_cached_tokens=self.request.num_cached_tokens,
            pooled=pooled,
            error=error,
            sampler_state=self.sampler_state,
            arrays={name: make(self) for name, make in self.arrays.items()}
            if finish_reason
            else {},
        )

    def as_new(self, block_tables: list[list[int]]) -> NewSequence:
        """Returns the message that makes the sequence known to the runner."""
        request = self.request
        return NewSequence(
            seq_id=self.seq_id,
            token_ids=list(self.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            block_tables=block_tables,
            params=request.params,
            seed=self.seed,
            stop_token_ids=sorted(request.end_token_ids),
            inputs=request.inputs,
            sampler_state=self.sampler_state,
            num_prompt_logprobs=request.num_prompt_logprobs,
            num_candidates=request.search.num_candidates if request.search else 0,
            encoder_id=None if request.encoder is None else request.encoder.seq_id,
            features=[structs.replace(feature, data=None) for feature in request.features],
        )

    def extended(self, seq_id: int, token_id: int, logprob: float) -> Sequence:
        """Returns a beam that extends this one. `logprob` is the sum over its output."""
        beam = Sequence(self.request, self.index, seq_id, self.seed)
        beam.token_ids = [*self.token_ids, token_id]
        beam.num_computed_tokens = self.num_computed_tokens
        beam._hashes = self._hashes.fork() if self._hashes is not None else None
        beam.logprob = logprob
        return beam

    @property
    def beam(self) -> Beam:
        return Beam(self.token_ids[self.request.num_prompt_tokens :], self.logprob)

    def block_hashes(self, block_size: int, num_blocks: int) -> list[bytes]:
        """Returns at least the first `num_blocks` hashes of the sequence's full blocks."""
        if self._hashes is None:
            self._hashes = PrefixHashes(self.request.salt, self.request.cache_keys)
        return self._hashes.block_hashes(self.token_ids, block_size, num_blocks)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_kept_tokens(self) -> int:
        """Number of computed tokens that are final whatever the running step samples: all but
        drafts."""
        return min(self.num_computed_tokens, self.num_tokens - 1)

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens still to compute, without drafts."""
        return len(self.token_ids) + self.num_placeholders - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of known output tokens."""
        return len(self.token_ids) - self.request.num_prompt_tokens


class Refused(NamedTuple):
    """Reason for which a request waits."""

    reason: Wait
    detail: str = ""
    """For the reason of a part: the part's name, and the text that its planner gave."""

    def __str__(self) -> str:
        return self.detail or WAITS[self.reason]


class Request:
    """A group of sequences with one prompt. It is admitted and preempted as a whole."""

    swapped = False
    """The request waits and keeps its blocks, on the host or loaded from a KV tier."""
    skips_tiers = False
    """A KV tier has failed to load the request's blocks. It computes what is not on the device."""
    num_cached_tokens = 0
    """Prompt tokens whose keys and values were cached when the request was first admitted."""
    scheduled_time: float | None = None
    """time.monotonic() at which the request was first admitted."""
    first_token_time: float | None = None
    """time.monotonic() of the first token."""
    sort_key: tuple[float, ...] = ()
    """The request's key in the scheduling policy's order, set when it is queued."""
    waits: Refused | None = None
    """Reason for which the request waits. If it runs: the last reason."""
    gave_way = False
    """The request was preempted for a waiting one, and waits behind that."""
    max_asked = sys.maxsize
    """Most drafts that drafters are asked for. A grammar may force more."""

    def __init__(
        self,
        message: EngineRequest,
        ids: Iterator[int],
        rules: RequestRules = RequestRules(),
    ) -> None:
        """`ids`: source of ids for the request's sequences, and for later beams."""
        self.request_id = message.request_id
        self.prompt_token_ids = message.prompt_token_ids
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.params = message.params
        self.inputs = message.inputs
        self.priority = message.priority
        self.arrival_time = message.arrival_time
        self.deadline = message.deadline
        self.context = message.context
        self.draws_tokens = message.draws_tokens
        self.chunkable = rules.chunked and message.chunkable
        self.forks_anywhere = rules.forks_anywhere
        self.max_drafts = rules.max_drafts
        self.reads_prefix_cache = message.reads_prefix_cache
        self.swappable = message.swappable
        self.salt = rules.salt
        self.encoder: Encoder | None = None
        if message.encoder is not None:
            self.encoder = Encoder(next(ids), message.encoder, rules.salt, message.cache_keys)
            self.salt = self.encoder.digest
        self.cache_keys = message.cache_keys
        self.features = over_prompt(message) if message.whole_prompt else message.features
        """Multimodal items of the prompt, by offset."""
        self.media_end = self.features[-1].mm_position.end if self.features else 0
        """Position from which on no token belongs to a multimodal item."""
        self.planned_end = 0
        """Position from which on planners need not see the tokens."""
        self._rules = rules
        self.max_output_tokens = message.max_output_tokens
        assert message.max_output_tokens > 0 or not message.draws_tokens, (
            "the front has not held the request to its limits"
        )
        self.most_tokens = self.num_prompt_tokens + (
            message.max_output_tokens if message.draws_tokens else 1
        )
        """Number of tokens, with the prompt, at which a sequence has nothing left to compute."""
        self.stop_token_ids = frozenset(message.params.stop_token_ids or ())
        self.end_token_ids = self.stop_token_ids.union(
            () if message.params.ignore_eos else message.eos_token_ids
        )
        """All tokens that end a sequence: `stop_token_ids`, and the model's own unless ignored."""
        self.num_prompt_logprobs = message.num_prompt_logprobs
        """Number of prompt tokens whose log probabilities were returned."""
        self.search = self._search()
        """Beam search of the request, or None. With a search, the sequences are its beams. There is
        one at first, and each step replaces them."""
        self.needs_tokens = rules.needs_tokens or self.search is not None
        """A sequence whose last token is a placeholder cannot compute that token."""
        self.sequences = self._begin(message, ids, rules.default_seed)
        self.unfinished = [seq for seq in self.sequences if seq.finish_reason is None]
        """Unfinished sequences. The list is replaced, never changed."""
        self.number = self.sequences[0].seq_id
        """Number of the request, in the order of arrival."""

    def _begin(
        self, message: EngineRequest, ids: Iterator[int], seed: int | None
    ) -> list[Sequence]:
        """`seed`: seed of a request that has none."""
        seed = message.params.seed if message.params.seed is not None else seed
        base = secrets.randbits(63) if seed is None else seed
        num_sequences = 1 if self.search else message.params.num_sequences
        # Each sequence samples from its own stream: the same seed gives the same continuations.
        sequences = [
            Sequence(self, i, next(ids), (base + i * _SEED_STRIDE) % 2**64)
            for i in range(num_sequences)
        ]
        # Few requests have begun on another engine.
        for seq, begun in zip(sequences, message.begun, strict=False):
            seq.token_ids += begun.token_ids
            seq.sampler_state = begun.sampler_state
            seq.finish_reason = begun.finish_reason
        return sequences

    def _search(self) -> BeamSearch | None:
        params = self.params
        if not params.use_beam_search:
            return None
        return BeamSearch(
            params.num_sequences,
            self.max_output_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            end_token_ids=self.end_token_ids,
        )

    def token_ranges(self, budget: int, *, encoded: bool = False) -> list[TokenRange]:
        """Returns the range that each sequence would compute now, with at most `budget` tokens in
        all. `encoded`: the encoder's keys and values are cached."""
        if self.encoder is not None and not encoded:
            budget -= self.num_to_encode
        ready = self._ready()
        ranges: list[TokenRange] = []
        if self.search and len(ready) > budget:
            # Beams advance together: a beam computed earlier would only wait for the others.
            return ranges
        for seq in ready:
            pause = self._until_pause(seq)
            pending = pause or seq.num_pending_tokens
            num_tokens = min(pending + (0 if pause else len(seq.drafts)), budget)
            if num_tokens > 0 and (num_tokens >= pending or self.chunkable):
                budget -= num_tokens
                start = seq.num_computed_tokens
                ranges.append(TokenRange(seq.seq_id, start, start + num_tokens))
        return ranges

    def _until_pause(self, seq: Sequence) -> int:
        """Number of tokens up to where a step must end, because of a fork or snapshot; or 0."""
        if (done := seq.num_computed_tokens) >= self.num_prompt_tokens:
            return 0
        stops: list[int] = []
        if not self.forks_anywhere and len(self.unfinished) > 1 and seq is self.leader:
            stops.append(self.num_prompt_tokens - 1)
        if self._rules.next_stop is not None and self.chunkable:
            stop = self._rules.next_stop(done, self.num_prompt_tokens)
            spans = [item.mm_position for item in self.features if self._rules.whole_items]
            stops += [] if any(span.offset < stop < span.end for span in spans) else [stop]
        return min((stop - done for stop in stops if stop > done), default=0)

    def _ready(self) -> list[Sequence]:
        """The sequences that can compute now: the leader, and sequences that have forked from it. A
        sequence that waits for its last token cannot.

        A beam waits until all beams of its request have candidates; only then are the next beams
        known.
        """
        ready = []
        leader = self.unfinished[0]
        for seq in self.unfinished:
            forked = seq is leader or seq.num_computed_tokens > 0 or self.num_prompt_tokens == 1
            drawn = len(seq.token_ids) + seq.num_placeholders >= self.most_tokens
            if forked and not drawn and not (self.needs_tokens and seq.num_placeholders):
                ready.append(seq)
        return ready

    def new_prompt_logprobs(
        self, row: ScheduledSequence, known: list[TokenLogprobs]
    ) -> list[TokenLogprobs]:
        """Returns the new ones among a row's prompt log probabilities. A preempted request may
        compute some of them again."""
        last = min(row.start + row.num_tokens, self.num_prompt_tokens - 1)
        new = known[max(0, self.num_prompt_logprobs - (last - len(known))) :]
        self.num_prompt_logprobs += len(new)
        return new

    def forget_computed(self) -> None:
        """Resets the computed tokens, so that the request is computed again. Results of running
        steps still count, except the candidates of beams."""
        self.swapped = False
        if self.encoder is not None:
            self.encoder.is_computed = False
        for seq in self.unfinished:
            seq.num_computed_tokens = 0
            if self.search:
                seq.num_placeholders = 0
                seq.candidates = None

    def forget_all(self) -> None:
        """`forget_computed`, and the worker no longer holds the request: no results will come."""
        self.forget_computed()
        for part in self.parts:
            part.on_worker = False
        for seq in self.unfinished:
            seq.num_placeholders = 0
            seq._hashes = None

    @property
    def parts(self) -> list[Sequence | Encoder]:
        """The unfinished sequences, and the encoder sequence if there is one. Each has blocks and a
        place on the worker."""
        return [*self.unfinished, *([] if self.encoder is None else [self.encoder])]

    @property
    def seq_ids(self) -> list[int]:
        """Ids of the request's unfinished sequences and of its encoder sequence."""
        return [part.seq_id for part in self.parts]

    @property
    def num_to_encode(self) -> int:
        """Number of encoder tokens still to compute, or 0. A step computes all of them, and some of
        the decoder's."""
        return 0 if self.encoder is None or self.encoder.is_computed else self.encoder.num_tokens

    @property
    def num_wanted_tokens(self) -> int:
        """Number of tokens that the request would compute now without a budget."""
        return self.num_to_encode + self.num_rows - 1 + self.leader.num_pending_tokens

    @property
    def least_tokens(self) -> int:
        """Fewest tokens that the request can compute in a step."""
        if self.search or not self.chunkable:
            return self.num_wanted_tokens
        return self.num_to_encode + (self._least_of_items if self._rules.whole_items else 1)

    @property
    def _least_of_items(self) -> int:
        """Number of tokens of the multimodal item at the next token. If a cached prefix may end in
        any item: of the longest item."""
        start = self.leader.num_computed_tokens
        places = [feature.mm_position for feature in self.features]
        if start >= self.media_end:
            return 1
        if start == 0:
            return max(place.length for place in places)
        return next((place.end - start for place in places if place.offset <= start < place.end), 1)

    @property
    def awaits_tokens(self) -> bool:
        """The request was preempted while a step was sampling tokens for it. A worker that has
        dropped it cannot know these tokens."""
        return self.search is None and any(seq.num_placeholders for seq in self.unfinished)

    def outputs_of_end(
        self, ended: Iterable[Sequence], reason: FinishReason, error: str | None
    ) -> list[EngineOutput]:
        """Outputs of sequences that end without another token. A beam search ends with as many
        outputs as it would have returned."""
        if not self.search:
            return [seq.output(reason, [], [], [], error=error) for seq in ended]
        return [
            EngineOutput(request_id=self.request_id, index=index, finish_reason=reason, error=error)
            for index in range(self.params.n)
        ]

    @property
    def num_known_tokens(self) -> int:
        """Number of the leader's known tokens that count for caching. Sequences that fork from it
        need the window before the prompt's last token, or the leader itself there."""
        if len(self.unfinished) == 1:
            return self.leader.num_tokens
        return self.num_prompt_tokens - (0 if self.forks_anywhere else 1)

    @property
    def num_rows(self) -> int:
        """Most batch rows that the request takes from now on."""
        return self.search.width if self.search else len(self.unfinished)

    @property
    def leader(self) -> Sequence:
        """The sequence that computes the prompt. The others fork from it."""
        return self.unfinished[0]

    @property
    def num_output_tokens(self) -> int:
        if self.search:
            return sum(
                len(hypothesis.token_ids) for hypothesis in self.search.hypotheses[: self.params.n]
            )
        return sum(s.num_output_tokens for s in self.sequences)
