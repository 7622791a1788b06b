"""RequestBlocks: the blocks of a request on its way through the batch; Admission: whether it may
begin, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Collection
from types import MappingProxyType
from typing import NamedTuple

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv.block_manager import BlockManager
from toolkit_lm.kv.group_blocks import TokenRange
from toolkit_lm.kv.tier import KVTier
from toolkit_lm.kv.tiers import Tiers
from toolkit_lm.messages import BlockCopy, ScheduledSequence, StepPlan, StepResult
from toolkit_lm.scheduler.beam_step import Fork
from toolkit_lm.scheduler.encoder import CrossBlocks, Encoder
from toolkit_lm.scheduler.planner import Planners
from toolkit_lm.scheduler.preemption import PreemptionCost
from toolkit_lm.scheduler.request import Refused, Request, Sequence
from toolkit_lm.scheduler.roster import Roster


class Admitted(NamedTuple):
    """It may begin, after what the cache has of it."""

    num_cached_tokens: int = 0
    """Of its leader's first tokens."""
    encoder: bool = False
    """The whole of its encoder's input is cached."""


class RequestBlocks:
    """The blocks of requests that come, share, give way and come back, and with them the computed
    counts of their sequences."""

    def __init__(
        self,
        config: VllmConfig,
        blocks: BlockManager,
        preemption: PreemptionCost,
        roster: Roster,
        planners: Planners,
        tiers: Mapping[str, KVTier] = MappingProxyType({}),
    ) -> None:
        self.blocks = blocks
        self.cross = CrossBlocks(blocks)
        self.preemption = preemption
        self.roster = roster
        self.planners = planners
        self.caching = config.cache.enable_prefix_caching is not False and blocks.caches_prefixes
        """Requests share prefixes."""
        self.tiers = Tiers(tiers if self.caching else {}, blocks)

    def admit(self, request: Request, admitted: Admitted) -> list[BlockCopy]:
        """Brings a waiting request's blocks back from the host, or gives it what is cached. Returns
        what is to be copied."""
        if request.swapped:
            request.swapped = False
            # Drafts that were verified meanwhile have moved its windows.
            self.trim(request)
            return self.blocks.swap_in(request.seq_ids)
        if num_cached := admitted.num_cached_tokens:
            self.blocks.adopt(request.leader.seq_id, request.leader.block_hashes, num_cached)
            request.leader.num_computed_tokens = num_cached
        if admitted.encoder and request.encoder is not None:
            self.cross.adopt(request.encoder)
            request.encoder.is_computed = True
        return []

    def ranges(self, request: Request, budget: int) -> list[TokenRange]:
        """What each sequence of a request would compute now, of at most `budget` tokens, with the
        room that there is for its media."""
        ranges = request.token_ranges(budget)
        return self.planners.fit(request, ranges) if request.planned_end else ranges

    def commit(self, plan: StepPlan, request: Request, ranges: Collection[TokenRange]) -> int:
        """Adds a running request's rows to a plan, with blocks for what they compute. Returns their
        number of tokens."""
        total = 0
        if request.planned_end:
            self.planners.commit(plan, request, ranges)
        if request.encoder is not None and not request.encoder.on_worker and ranges:
            total = self._commit_encoder(plan, request.encoder)
        for tokens in ranges:
            seq = self.roster.sequences[tokens.seq_id]
            samples = (
                request.draws_tokens
                and (num_drafts := tokens.end - len(seq.token_ids) - seq.num_placeholders) >= 0
            )
            row = ScheduledSequence(
                seq.seq_id,
                tokens.start,
                tokens.end - tokens.start,
                self.blocks.append_slots(tokens, plan),
                samples,
            )
            row.num_drafts = num_drafts if samples else 0
            if row.num_drafts or (
                request.needs_tokens and seq.on_worker and tokens.end > request.num_prompt_tokens
            ):
                row.tokens = seq.token_ids[tokens.start : tokens.end] + seq.drafts[: row.num_drafts]
            if not seq.on_worker:
                plan.new.append(seq.as_new(self.blocks.worker_tables(seq.seq_id)))
                seq.on_worker = True
            seq.num_computed_tokens = tokens.end
            # Where keys and values are written before any are read, who comes later in this very
            # step may share what it writes.
            self.publish(seq, tokens.end if self.blocks.shared_within_step else tokens.start)
            if row.samples:
                seq.num_placeholders += 1
                seq.drafts = []
            plan.scheduled.append(row)
            total += row.num_tokens
        if len(request.unfinished) > 1:
            self._fork_from_leader(request)
        return total

    def commit_next(self, plan: StepPlan, request: Request) -> bool:
        """As `commit` of a request that computes the one token that it has drawn, inside a block:
        most rows of most steps. Else False."""
        seq = request.unfinished[0]
        start = seq.num_computed_tokens
        num_tokens = len(seq.token_ids) + seq.num_placeholders
        size = self.blocks.stride
        is_usual = (
            seq.on_worker
            and request.draws_tokens
            and not (request.needs_tokens or start < request.planned_end or seq.drafts)
        )
        # Where the token before it was written, there is room for it, and no block is full after
        # it.
        is_next = (
            len(request.unfinished) == 1
            and start + 1 == num_tokens < request.most_tokens
            and 0 < start % size < self.blocks.last_inside
        )
        if not (is_usual and is_next):
            return False
        seq.num_computed_tokens = num_tokens
        seq.num_placeholders += 1
        plan.scheduled.append(ScheduledSequence(seq.seq_id, start, 1, self.blocks.none, True))
        return True

    def _commit_encoder(self, plan: StepPlan, encoder: Encoder) -> int:
        """Makes the worker know an encoder sequence. Returns how many tokens of it the step
        computes."""
        num_tokens = 0 if encoder.is_computed else encoder.num_tokens
        if num_tokens:
            self.cross.allocate(encoder, publish=self.caching)
        plan.encoders.append(encoder.as_new(self.blocks.worker_tables(encoder.seq_id)))
        encoder.is_computed = encoder.on_worker = True
        return num_tokens

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Lets others find what is computed of a sequence's first tokens, as far as these are
        known."""
        if self.caching:
            self.blocks.publish(seq.seq_id, seq.block_hashes, min(num_tokens, len(seq.token_ids)))

    def _fork_from_leader(self, request: Request) -> None:
        """Once the leader has computed the prompt, the others share it, but for its last token:
        they compute that again to draw from it.

        It happens with the step that completes the prompt, since the leader may end with that step.
        """
        leader = request.leader
        shared = request.num_prompt_tokens - 1
        if (
            shared == 0
            or leader.num_computed_tokens < shared
            or (request.forks_anywhere and leader.num_computed_tokens == shared)
        ):
            return
        for seq in request.unfinished:
            if seq is not leader and seq.num_computed_tokens == 0:
                self.blocks.fork(leader.seq_id, seq.seq_id, shared)
                seq.num_computed_tokens = shared

    def replace_beams(self, request: Request, forks: Collection[Fork]) -> list[Sequence]:
        """A beam search goes on to other beams. Returns those before, which are still to be
        released."""
        for parent, child in forks:
            self.blocks.fork(parent.seq_id, child.seq_id, child.num_computed_tokens)
        beams = request.sequences
        request.sequences = request.unfinished = [fork.child for fork in forks]
        self.roster.add_sequences(request.sequences)
        return beams

    def trim(self, request: Request) -> None:
        """Gives back what windows have left behind, before the next step is planned."""
        for seq in request.unfinished:
            if not self.blocks.shared_within_step:
                # From the next step on others can read it: who gives a block back unnamed would
                # have computed it for nobody.
                self.publish(seq, seq.num_computed_tokens)
            self.blocks.trim(seq.seq_id, seq.num_kept_tokens)

    def swap_out(self, request: Request) -> list[BlockCopy] | None:
        """Moves a request's blocks to the host; None where it is better computed again, or has no
        room there."""
        if not request.swappable:
            return None
        if request.planned_end or self.planners.of_plugins:
            self.planners.release(request.request_id)
        num_tokens = sum(seq.num_computed_tokens for seq in request.unfinished)
        if not self.preemption.prefers_swap(num_tokens, self.blocks.num_own_bytes(request.seq_ids)):
            return None
        copies = self.blocks.swap_out(request.seq_ids)
        request.swapped = copies is not None
        return copies

    def begin_load(self, request: Request) -> bool:
        """Whether one that waits is loaded from a KV tier first. It holds the blocks then."""
        if (
            request.swapped
            or request.skips_tiers
            or request.awaits_tokens
            or request.encoder is not None
            or not request.reads_prefix_cache
        ):
            return False
        leader = request.leader
        limit = request.num_known_tokens - 1
        reserve = self.roster.num_running
        if not self.tiers.begin(
            request.request_id, leader.seq_id, leader.block_hashes, limit, reserve
        ):
            return False
        self.roster.load(request)
        return True

    def take_loads(self, plan: StepPlan, result: StepResult) -> None:
        """Requests that a KV tier has filled, or failed, wait as others do."""
        for request_id, num_tokens in self.tiers.take(plan, result.loads):
            self._end_load(self.roster.requests[request_id], num_tokens)

    def end_late_loads(self, now: float) -> None:
        """Those whose blocks have not come in time compute themselves."""
        for request_id in self.tiers.expired(now):
            self._end_load(self.roster.requests[request_id], 0)

    def _end_load(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens of its leader are in its blocks; 0: they did not come."""
        self.roster.loaded(request)
        if num_tokens:
            request.swapped = True
            request.leader.num_computed_tokens = num_tokens
            self.publish(request.leader, num_tokens)
        else:
            request.skips_tiers = True
            self.start_over(request)

    def end(self, request: Request) -> None:
        """All of its sequences have ended, and given back their blocks."""
        if request.planned_end or self.planners.of_plugins:
            self.planners.release(request.request_id)
        if self.tiers.tiers:
            self.tiers.cancel(request.request_id)
        if request.encoder is not None:
            self.blocks.free(request.encoder.seq_id)

    def start_over(self, request: Request) -> None:
        """A waiting request gives up what is computed of it."""
        for seq_id in request.seq_ids:
            self.blocks.free(seq_id)
        if request.planned_end or self.planners.of_plugins:
            self.planners.release(request.request_id)
        request.forget_computed()


class Admission:
    """Asks all that a request needs to begin: rows, tokens, blocks, and room for its media."""

    def __init__(self, config: VllmConfig, request_blocks: RequestBlocks) -> None:
        self.blocks = request_blocks.blocks
        self.cross = request_blocks.cross
        self.roster = request_blocks.roster
        self.planners = request_blocks.planners
        self.caching = request_blocks.caching
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.chunk = config.scheduler.token_budget
        """Most tokens of a step."""
        self._start_over = request_blocks.start_over

    def decide(self, request: Request, budget: int) -> Admitted | Refused:
        """Whether one that waits can run, and compute some of `budget` tokens. It takes nothing;
        but where nothing runs, swapped requests may start over to make room."""
        num_running = self.roster.num_running
        if request.awaits_tokens:
            return Refused("drawing")
        if num_running + request.num_rows > self.max_num_seqs:
            return Refused("batch")
        if budget == 0:
            return Refused("policy")
        while True:
            admitted = Admitted(self._num_cached(request), self._has_encoder(request))
            own = budget - (0 if admitted.encoder else request.num_to_encode)
            if (1 if request.chunkable else request.leader.num_pending_tokens) > own:
                return Refused("tokens")
            # Leave each running sequence a block to grow into: admitting one that is preempted at
            # once would waste its prefill.
            if self.blocks.has_free(self._num_blocks(request, budget, admitted), num_running):
                if not (request.planned_end or self.planners.may_begin):
                    return admitted
                return self._refusal(request, admitted, budget) or admitted
            if self.roster.running or not self._discard_swapped():
                return Refused("blocks")

    def _refusal(self, request: Request, admitted: Admitted, budget: int) -> Refused | None:
        """Why a part cannot have it begin after what is cached."""
        start = max(admitted.num_cached_tokens, request.leader.num_computed_tokens)
        end = min(start + budget, request.leader.num_tokens)
        first = TokenRange(request.leader.seq_id, start, end)
        return self.planners.refusal(request, first)

    def _num_cached(self, request: Request) -> int:
        """Tokens of its leader whose keys and values are in the cache. Its last token is computed
        in any case."""
        if not self.caching or request.swapped or not request.reads_prefix_cache:
            return 0
        return self.blocks.find_prefix(request.leader.block_hashes, request.num_known_tokens - 1)

    def _has_encoder(self, request: Request) -> bool:
        """Whether the cache has all that its encoder is still to compute."""
        return (
            self.caching
            and request.num_to_encode > 0
            and request.encoder is not None
            and self.cross.is_cached(request.encoder)
        )

    def _num_blocks(self, request: Request, budget: int, admitted: Admitted) -> list[int]:
        """Free blocks per pool that it takes: for the whole of its prompt, not only the first
        chunk."""
        ranges = request.token_ranges(budget, encoded=admitted.encoder)
        growth = self.blocks.blocks_needed(ranges)
        if request.swapped:
            return _sum(self.blocks.num_swapped(request.seq_ids), growth)
        needed = self._num_of_decoder(request, ranges, growth, admitted.num_cached_tokens)
        if request.encoder is None:
            return needed
        return _sum(needed, self.cross.num_needed(request.encoder, cached=admitted.encoder))

    def _num_of_decoder(
        self, request: Request, ranges: Collection[TokenRange], growth: list[int], num_cached: int
    ) -> list[int]:
        """As `_num_blocks`, without its encoder's. `growth`: what `ranges` take, nothing being
        cached."""
        leader = request.leader
        if not num_cached and ranges[:1] == [(leader.seq_id, 0, leader.num_tokens)]:
            # The first chunk is the whole.
            return growth
        whole = self.blocks.config.max_blocks(leader.num_tokens, self.chunk)
        if not num_cached:
            return [max(both) for both in zip(whole, growth, strict=True)]
        shared = self.blocks.num_shared(leader.block_hashes, num_cached)
        return [all_ - its for all_, its in zip(whole, shared, strict=True)]

    def _discard_swapped(self) -> bool:
        """Swapped requests keep the blocks that they share: when these are in everybody's way, the
        last of them starts over."""
        swapped = [request for request in self.roster.waiting if request.swapped]
        if swapped:
            self._start_over(swapped[-1])
        return bool(swapped)


def _sum(one: Collection[int], other: Collection[int]) -> list[int]:
    return [sum(both) for both in zip(one, other, strict=True)]
