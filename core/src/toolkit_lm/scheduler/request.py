"""Request and Sequence: what the scheduler knows of the work."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable, Iterator
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
from toolkit_lm.scheduler.encoder import Encoder

_SEED_STRIDE = 0x9E3779B97F4A7C15


class Sequence:
    """One of a request's continuations: what is computed so far, and what is wanted.

    A token that a running step will draw is a placeholder until `Scheduler.update`: it counts, but
    has no id yet.
    """

    __slots__ = (
        "_hashes",
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
        """Tokens whose keys and values are in the cache, those of the running step included."""
        self.num_placeholders = 0
        self.drafts: list[int] = []
        """Guesses at the tokens to come. The next step computes them too, as far as they fit, and
        keeps those that it draws."""
        self.on_worker = False
        """The runner holds it: a plan has made it known, and none has dropped it."""
        self.sampler_state: SamplerState = {}
        """What the sampler is to have back when the sequence returns from a preemption."""
        self.finish_reason: FinishReason | None = None
        self._hashes: PrefixHashes | None = None
        """None until it has a full block."""
        self.logprob = 0.0
        """Of a beam: the sum over its output."""
        self.candidates: Candidates | None = None
        """Of a beam: what its next token may be, until all beams of the request know. Meanwhile
        that token is a placeholder."""

    def take(self, tokens: list[int], drafts: list[int]) -> FinishReason | None:
        """Appends what a step drew in the place of a placeholder, up to the token that ends the
        sequence.

        `drafts`: guesses at what follows. Returns why it has ended, None where it goes on.
        """
        self.num_placeholders -= 1
        request = self.request
        for token in tokens:
            self.token_ids.append(token)
            if token in request.end_token_ids:
                return "stop"
            if len(self.token_ids) >= request.most_tokens:
                return "length"
        # Of drafts that were not drawn, the keys and values are written over.
        self.num_computed_tokens = min(
            self.num_computed_tokens, len(self.token_ids) + self.num_placeholders - 1
        )
        if drafts and not self.num_placeholders:
            # The last token of all is drawn, and never computed.
            fitting = drafts[
                : min(request.max_drafts, request.most_tokens - len(self.token_ids) - 1)
            ]
            # What ends the sequence is drawn too: a failure of what would follow is not to count.
            self.drafts = list(takewhile(lambda token: token not in request.end_token_ids, fitting))
        return None

    def output(
        self,
        finish_reason: FinishReason | None,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        prompt_logprobs: list[TokenLogprobs],
        pooled: Array | None = None,
    ) -> EngineOutput:
        """What a step gave to it."""
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
            sampler_state=self.sampler_state,
        )

    def as_new(self, block_tables: list[list[int]]) -> NewSequence:
        """For a runner that does not hold it."""
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
            features=[structs.replace(one, data=None) for one in request.features],
        )

    def extended(self, seq_id: int, token_id: int, logprob: float) -> Sequence:
        """A beam that goes on from this one; `logprob` is the sum over its output."""
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
        """At least the first `num_blocks` hashes of its full blocks."""
        if self._hashes is None:
            self._hashes = PrefixHashes(self.request.salt, self.request.cache_keys)
        return self._hashes.block_hashes(self.token_ids, block_size, num_blocks)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_kept_tokens(self) -> int:
        """Computed tokens that count whatever the running step draws: those that are no drafts."""
        return min(self.num_computed_tokens, self.num_tokens - 1)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens still to compute, but for drafts."""
        return len(self.token_ids) + self.num_placeholders - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Those that are known."""
        return len(self.token_ids) - self.request.num_prompt_tokens


class Refused(NamedTuple):
    """Why a request waits."""

    reason: Wait
    detail: str = ""
    """Of a part: its name, and what it says."""

    def __str__(self) -> str:
        return self.detail or WAITS[self.reason]


class RequestRules(NamedTuple):
    """What holds for all requests of an engine."""

    salt: str = ""
    """Goes into the hashes of their blocks."""
    default_seed: int | None = None
    """Of those that have none. None: one is drawn for each."""
    chunked: bool = True
    """Prompts may be computed in several steps."""
    needs_tokens: bool = False
    """A drawn token is computed once it is known, and not before: only the last pipeline stage has
    it until then, or drafts follow it."""
    forks_anywhere: bool = True
    """Sequences can fork from the leader at any token. Else it stops where they do."""
    max_drafts: int = sys.maxsize
    """Most drafts that a step computes of a sequence."""
    whole_items: bool = False
    """A step computes all tokens of an item of media, or none."""


class Request:
    """A group of sequences over one prompt. It is admitted and preempted whole."""

    swapped = False
    """It waits, and keeps its blocks: on the host, or filled from a KV tier."""
    skips_tiers = False
    """A KV tier has failed it: it computes itself what is not on the device."""
    num_cached_tokens = 0
    """Prompt tokens whose keys and values were found in the cache when it was first admitted."""
    scheduled_time: float | None = None
    """time.monotonic() at which it was first admitted."""
    first_token_time: float | None = None
    """time.monotonic() of its first token."""
    sort_key: tuple[float, ...] = ()
    """Its place in the scheduling policy's order, from when it is queued."""
    waits: Refused | None = None
    """Why it waits; of one that runs, why it last did."""
    gave_way = False
    """It was preempted for one that waited, and waits behind that."""

    def __init__(
        self,
        message: EngineRequest,
        ids: Iterator[int],
        rules: RequestRules = RequestRules(),
    ) -> None:
        """`ids`: of its sequences, and of beams to come."""
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
        self.features = message.features
        """The items of media in its prompt, by offset."""
        self.media_end = message.features[-1].mm_position.end if message.features else 0
        """Tokens from here on read none of them."""
        self.planned_end = 0
        """Tokens from here on are nothing to planners."""
        self._whole_items = rules.whole_items
        self.max_output_tokens = message.max_output_tokens
        assert message.max_output_tokens > 0 or not message.draws_tokens, (
            "the front has not held the request to its limits"
        )
        self.most_tokens = self.num_prompt_tokens + (
            message.max_output_tokens if message.draws_tokens else 1
        )
        """A sequence of so many tokens, the prompt included, has nothing left to compute."""
        self.stop_token_ids = frozenset(message.params.stop_token_ids or ())
        self.end_token_ids = self.stop_token_ids.union(
            () if message.params.ignore_eos else message.eos_token_ids
        )
        """Those, and the model's own: each ends a sequence."""
        self.num_prompt_logprobs = message.num_prompt_logprobs
        """Prompt tokens whose log probabilities were returned."""
        self.search = self._search()
        """Set for a beam search: its sequences are then the beams, which a step replaces; there is
        one at first."""
        self.needs_tokens = rules.needs_tokens or self.search is not None
        """A sequence whose last token is a placeholder cannot compute it."""
        self.sequences = self._begin(message, ids, rules.default_seed)
        self.unfinished = [seq for seq in self.sequences if seq.finish_reason is None]
        """Those of them that have not ended. It is replaced, and never changed."""
        self.number = self.sequences[0].seq_id
        """Requests are numbered as they come."""

    def _begin(
        self, message: EngineRequest, ids: Iterator[int], seed: int | None
    ) -> list[Sequence]:
        """`seed`: of a request that has none."""
        seed = message.params.seed if message.params.seed is not None else seed
        base = secrets.randbits(63) if seed is None else seed
        num_sequences = 1 if self.search else message.params.num_sequences
        # Each sequence draws from its own stream; the same seed gives the same continuations.
        sequences = [
            Sequence(self, i, next(ids), (base + i * _SEED_STRIDE) % 2**64)
            for i in range(num_sequences)
        ]
        # Few have begun elsewhere.
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
        """What each of its sequences would compute now, of at most `budget` tokens. `encoded`: its
        encoder's input is cached."""
        if self.encoder is not None and not encoded:
            budget -= self.num_to_encode
        ready = self._ready()
        ranges: list[TokenRange] = []
        if self.search and len(ready) > budget:
            # Beams advance together: those that are computed would wait for the others.
            return ranges
        for seq in ready:
            pending = self._until_fork(seq) or seq.num_pending_tokens
            num_tokens = min(pending + len(seq.drafts), budget)
            if num_tokens > 0 and (num_tokens >= pending or self.chunkable):
                budget -= num_tokens
                ranges.append(
                    TokenRange(
                        seq.seq_id, seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
                    )
                )
        return ranges

    def _until_fork(self, seq: Sequence) -> int:
        """Tokens of the leader before the prompt's last one, where others must fork; 0: it need not
        stop there."""
        if self.forks_anywhere or len(self.unfinished) == 1 or seq is not self.leader:
            return 0
        return max(0, self.num_prompt_tokens - 1 - seq.num_computed_tokens)

    def _ready(self) -> list[Sequence]:
        """The sequences that can compute: the leader, and those that have forked from it; but none
        that waits for its last token.

        Nor a beam that waits for any: which token it will be, and of how many beams, is known when
        all have their candidates.
        """
        ready = []
        leader = self.unfinished[0]
        for seq in self.unfinished:
            forked = seq is leader or seq.num_computed_tokens > 0 or self.num_prompt_tokens == 1
            drawn = len(seq.token_ids) + seq.num_placeholders >= self.most_tokens
            if forked and not drawn and not (self.needs_tokens and seq.num_placeholders):
                ready.append(seq)
        return ready

    def take_prompt_logprobs(
        self, row: ScheduledSequence, known: list[TokenLogprobs]
    ) -> list[TokenLogprobs]:
        """Those of what a row computed that are new: it may have been preempted with a step on its
        way, and computed again."""
        last = min(row.start + row.num_tokens, self.num_prompt_tokens - 1)
        new = known[max(0, self.num_prompt_logprobs - (last - len(known))) :]
        self.num_prompt_logprobs += len(new)
        return new

    def forget_computed(self) -> None:
        """It will be computed again from its tokens. What is on its way still comes, but for the
        candidates of beams."""
        self.swapped = False
        if self.encoder is not None:
            self.encoder.is_computed = False
        for seq in self.unfinished:
            seq.num_computed_tokens = 0
            if self.search:
                seq.num_placeholders = 0
                seq.candidates = None

    def forget_all(self) -> None:
        """As `forget_computed`; and the worker does not hold it, and nothing is on its way."""
        self.forget_computed()
        for part in self.parts:
            part.on_worker = False
        for seq in self.unfinished:
            seq.num_placeholders = 0

    @property
    def parts(self) -> list[Sequence | Encoder]:
        """What has blocks and a place on the worker: the unfinished sequences, and the
        encoder's."""
        return [*self.unfinished, *([] if self.encoder is None else [self.encoder])]

    @property
    def seq_ids(self) -> list[int]:
        """Of its parts."""
        return [part.seq_id for part in self.parts]

    @property
    def num_to_encode(self) -> int:
        """Tokens of its encoder's input, where they are still to be computed: a step computes all
        of them, and some of its own."""
        return 0 if self.encoder is None or self.encoder.is_computed else self.encoder.num_tokens

    @property
    def num_wanted_tokens(self) -> int:
        """Tokens that it would compute now, were there room."""
        return self.num_to_encode + self.num_rows - 1 + self.leader.num_pending_tokens

    @property
    def least_tokens(self) -> int:
        """Fewest tokens that it can compute in a step."""
        if self.search or not self.chunkable:
            return self.num_wanted_tokens
        return self.num_to_encode + (self._least_of_items if self._whole_items else 1)

    @property
    def _least_of_items(self) -> int:
        """Tokens of the item that its next token belongs to; of the longest, where what is cached
        may end at any of them."""
        start = self.leader.num_computed_tokens
        places = [one.mm_position for one in self.features]
        if start >= self.media_end:
            return 1
        if start == 0:
            return max(place.length for place in places)
        return next((place.end - start for place in places if place.offset <= start < place.end), 1)

    @property
    def awaits_tokens(self) -> bool:
        """It was preempted, and tokens of it are on their way, which a worker that does not hold it
        would not have."""
        return self.search is None and any(seq.num_placeholders for seq in self.unfinished)

    def outputs_of_end(
        self, ended: Iterable[Sequence], reason: FinishReason, error: str | None
    ) -> list[EngineOutput]:
        """Of these sequences, which end without another token; of a search, of all that it was to
        find."""
        indices = range(self.params.n) if self.search else [seq.index for seq in ended]
        return [
            EngineOutput(request_id=self.request_id, index=index, finish_reason=reason, error=error)
            for index in indices
        ]

    @property
    def num_known_tokens(self) -> int:
        """Of its leader. Those that fork from it need the window before the prompt's last token."""
        return self.leader.num_tokens if len(self.unfinished) == 1 else self.num_prompt_tokens

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
            return sum(
                len(hypothesis.token_ids) for hypothesis in self.search.hypotheses[: self.params.n]
            )
        return sum(s.num_output_tokens for s in self.sequences)
