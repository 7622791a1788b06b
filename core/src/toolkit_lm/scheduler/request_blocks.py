"""RequestBlocks: the blocks of a request from admission to its end. Admission: whether a request
may begin, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Collection
from types import MappingProxyType
from typing import NamedTuple

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv.block_manager import BlockManager
from toolkit_lm.kv.group_blocks import GroupBlocks, TokenRange
from toolkit_lm.kv.snapshots import Snapshots
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
    """The request may begin after its cached prefix."""

    num_cached_tokens: int = 0
    """Number of the leader's first tokens that are cached."""
    encoder: bool = False
    """The encoder's whole input is cached."""


class RequestBlocks:
    """Allocates, shares, swaps and frees the blocks of requests, and keeps the computed counts of
    their sequences up to date."""

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
        """Requests share cached prefixes."""
        self.snapshots = Snapshots(blocks)
        self.keeps_snapshots = self.caching and bool(self.snapshots)
        self.next_stop = self.snapshots.next_stop if self.keeps_snapshots else None
        self.tiers = Tiers(tiers if self.caching else {}, blocks, preemption.seconds)
        self.watch()

    def watch(self) -> None:
        """Has planners told which contents of blocks can be found, if there are some to tell."""
        if self.planners.watching:
            self.blocks.on_published = self._tell_stored
            for pool in self.blocks.pools:
                pool.on_forgotten = self.planners.forgotten

    def _tell_stored(self, seq_id: int, group: GroupBlocks, indices: list[int]) -> None:
        self.planners.stored(self.roster.sequences[seq_id], group, indices)

    def admit(self, request: Request, admitted: Admitted) -> list[BlockCopy]:
        """Swaps a waiting request's blocks in from the host, or gives it its cached prefix. Returns
        the copies to make."""
        if request.swapped:
            request.swapped = False
            # Drafts that were verified in the meantime have moved its windows.
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
        """Returns the range that each sequence of the request would compute now, with at most
        `budget` tokens in all. Ranges end where media or other parts have no room."""
        ranges = request.token_ranges(budget)
        return self.planners.fit(request, ranges) if request.planned_end else ranges

    def commit(self, plan: StepPlan, request: Request, ranges: Collection[TokenRange]) -> int:
        """Adds a running request's rows to the plan, and allocates blocks for them. Returns the
        number of tokens."""
        total = 0
        if request.planned_end:
            self.planners.commit(plan, request, ranges)
        if request.encoder is not None and not request.encoder.on_worker and ranges:
            total = self._commit_encoder(plan, request.encoder)
        if self.keeps_snapshots:
            for tokens in ranges:
                hashes = self.roster.sequences[tokens.seq_id].block_hashes
                self.snapshots.keep(tokens, request.num_prompt_tokens, hashes, plan, ranges)
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
            # Where keys and values are written before any are read, later requests of this very
            # step can share them.
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
        """Fast path of `commit` for a plain decode row (one known token, no block boundary). False:
        use `commit`."""
        seq = request.unfinished[0]
        start = seq.num_computed_tokens
        num_tokens = len(seq.token_ids) + seq.num_placeholders
        is_usual = (
            seq.on_worker
            and request.draws_tokens
            and not (request.needs_tokens or start < request.planned_end or seq.drafts)
        )
        # The previous token was written to the same block, so there is room, and this token does
        # not fill the block.
        is_next = (
            len(request.unfinished) == 1
            and start + 1 == num_tokens < request.most_tokens
            and start % self.blocks.stride not in self.blocks.edges
        )
        if not (is_usual and is_next):
            return False
        seq.num_computed_tokens = num_tokens
        seq.num_placeholders += 1
        plan.scheduled.append(ScheduledSequence(seq.seq_id, start, 1, self.blocks.none, True))
        return True

    def _commit_encoder(self, plan: StepPlan, encoder: Encoder) -> int:
        """Adds an encoder sequence to the plan. Returns the number of its tokens that the step
        computes."""
        num_tokens = 0 if encoder.is_computed else encoder.num_tokens
        if num_tokens:
            self.cross.allocate(encoder, publish=self.caching)
        plan.encoders.append(encoder.as_new(self.blocks.worker_tables(encoder.seq_id)))
        encoder.is_computed = encoder.on_worker = True
        return num_tokens

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Makes the full blocks of a sequence's first `num_tokens` tokens available to others, as
        far as the tokens are known."""
        if self.caching:
            self.blocks.publish(seq.seq_id, seq.block_hashes, min(num_tokens, len(seq.token_ids)))

    def _fork_from_leader(self, request: Request) -> None:
        """Once the leader has computed the prompt, the other sequences share it except for its last
        token. They compute that token again to sample from it.

        This happens in the step that completes the prompt, since the leader may end with that step.
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
        """Replaces a beam search's beams by the next ones. Returns the old beams, which are still
        to be released."""
        for parent, child in forks:
            self.blocks.fork(parent.seq_id, child.seq_id, child.num_computed_tokens)
        beams = request.sequences
        request.sequences = request.unfinished = [fork.child for fork in forks]
        self.roster.add_sequences(request.sequences)
        return beams

    def trim(self, request: Request) -> None:
        """Frees blocks that have left the attention window, before the next step is planned."""
        for seq in request.unfinished:
            if not self.blocks.shared_within_step:
                # Others can read these blocks from the next step on. A block freed before it is
                # published would be lost to them.
                self.publish(seq, seq.num_computed_tokens)
            self.blocks.trim(seq.seq_id, seq.num_kept_tokens)

    def swap_out(self, request: Request) -> list[BlockCopy] | None:
        """Swaps a request's blocks out to the host. Returns None if recomputing is better, or the
        host has no room."""
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
        """Whether the waiting request is first loaded from a KV tier. If so, it now holds the
        blocks."""
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

    def finish_loads(self, plan: StepPlan, result: StepResult) -> None:
        """Requests whose load has ended, completely or with a failure, go back to the queue."""
        for request_id, num_tokens in self.tiers.finish_loads(plan, result.loads):
            self._end_load(self.roster.requests[request_id], num_tokens)

    def end_late_loads(self, now: float) -> None:
        """Requests whose blocks have not arrived in time compute their tokens themselves."""
        for request_id in self.tiers.expired(now):
            self._end_load(self.roster.requests[request_id], 0)

    def _end_load(self, request: Request, num_tokens: int) -> None:
        """The leader's first `num_tokens` tokens are in its blocks; 0: the load failed."""
        self.roster.loaded(request)
        if num_tokens:
            request.swapped = True
            request.leader.num_computed_tokens = num_tokens
            self.publish(request.leader, num_tokens)
        else:
            request.skips_tiers = True
            self.start_over(request)

    def end_step(self, plan: StepPlan) -> None:
        """Frees the step's snapshots, and gives the plan its work for KV tiers."""
        if self.keeps_snapshots:
            self.snapshots.release()
        if self.tiers.tiers:
            plan.tiers = self.tiers.end_step(plan, idle=not self.roster.running)

    def reset(self, plans: Collection[StepPlan]) -> None:
        """Drops all blocks, and what these plans were to do: their steps have failed."""
        self.blocks.reset()
        self.snapshots.reset()
        self.planners.reset(plans)
        self.tiers.reset(plans)

    def forget_contents(self, request: Request) -> None:
        """Makes the content of its blocks unfindable, since it may be wrong."""
        for seq_id in request.seq_ids:
            self.blocks.forget_contents(seq_id)
        self.snapshots.forget(request.leader.block_hashes, request.num_prompt_tokens)

    def end(self, request: Request) -> None:
        """Frees what is left of a request whose sequences have ended and released their blocks."""
        if request.planned_end or self.planners.of_plugins:
            self.planners.release(request.request_id)
        if self.tiers.tiers:
            self.tiers.cancel(request.request_id)
        if request.encoder is not None:
            self.blocks.free(request.encoder.seq_id)

    def start_over(self, request: Request) -> None:
        """A waiting request gives up its computed tokens and blocks."""
        for seq_id in request.seq_ids:
            self.blocks.free(seq_id)
        if request.planned_end or self.planners.of_plugins:
            self.planners.release(request.request_id)
        request.forget_computed()


class Admission:
    """Decides whether a request may begin: rows, tokens, blocks, and room for its media."""

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
        """Whether a waiting request can run now, and compute some of `budget` tokens. It allocates
        nothing. If no request runs, swapped requests may start over to make room."""
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
            # Each running sequence keeps a free block to grow into. A request that is preempted
            # right after its admission would waste its prefill.
            if self.blocks.has_free(self._num_blocks(request, budget, admitted), num_running):
                if not (request.planned_end or self.planners.may_begin):
                    return admitted
                return self._refusal(request, admitted, budget) or admitted
            if self.roster.running or not self._discard_swapped():
                return Refused("blocks")

    def makes_room(self, request: Request) -> bool:
        """Makes a swapped request start over, if there is one and `request` is the only that runs:
        preempted, that would be admitted to the same blocks again."""
        return self.roster.running == [request] and self._discard_swapped()

    def _refusal(self, request: Request, admitted: Admitted, budget: int) -> Refused | None:
        """Reason of a part that refuses to let the request begin after its cached prefix; None: it
        may begin."""
        start = max(admitted.num_cached_tokens, request.leader.num_computed_tokens)
        end = min(start + budget, request.leader.num_tokens)
        first = TokenRange(request.leader.seq_id, start, end)
        return self.planners.refusal(request, first)

    def _num_cached(self, request: Request) -> int:
        """Number of the leader's tokens whose keys and values are cached. The last token is always
        computed."""
        if not self.caching or request.swapped or not request.reads_prefix_cache:
            return 0
        return self.blocks.find_prefix(request.leader.block_hashes, request.num_known_tokens - 1)

    def _has_encoder(self, request: Request) -> bool:
        """Whether the cache holds everything that the request's encoder would still compute."""
        return (
            self.caching
            and request.num_to_encode > 0
            and request.encoder is not None
            and self.cross.is_cached(request.encoder)
        )

    def _num_blocks(self, request: Request, budget: int, admitted: Admitted) -> list[int]:
        """Number of free blocks that the request needs, per pool: for its whole prompt, not only
        the first chunk."""
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
        """Blocks for the decoder part of `_num_blocks`. `growth`: blocks for `ranges` if nothing is
        cached."""
        leader = request.leader
        if not num_cached and ranges[:1] == [(leader.seq_id, 0, leader.num_tokens)]:
            # The first chunk is the whole prompt.
            return growth
        whole = self.blocks.config.max_blocks(leader.num_tokens, self.chunk)
        if not num_cached:
            return [max(both) for both in zip(whole, growth, strict=True)]
        shared = self.blocks.num_shared(leader.block_hashes, num_cached)
        return [all_ - owned for all_, owned in zip(whole, shared, strict=True)]

    def _discard_swapped(self) -> bool:
        """Makes the last swapped request start over, if there is one. Swapped requests keep their
        shared blocks, which may block all others."""
        swapped = [request for request in self.roster.waiting if request.swapped]
        if swapped:
            self._start_over(swapped[-1])
        return bool(swapped)


def _sum(first: Collection[int], other: Collection[int]) -> list[int]:
    return [sum(both) for both in zip(first, other, strict=True)]
