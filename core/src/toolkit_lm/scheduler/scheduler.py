"""The scheduler: which tokens of which sequences the next step computes."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence as Collection
from itertools import count
from types import MappingProxyType

from toolkit_lm.attention import KVCacheConfig
from toolkit_lm.config import VllmConfig
from toolkit_lm.config.tasks import PoolingTask
from toolkit_lm.errors import RequestError
from toolkit_lm.events import LoadEvent, RequestEvent, RequestEventKind
from toolkit_lm.messages import (
    Array,
    Candidates,
    EngineOutput,
    EngineRequest,
    NewSequence,
    PoolingRules,
    ScheduledSequence,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from toolkit_lm.params import FinishReason
from toolkit_lm.scheduler.beam import BeamSearch
from toolkit_lm.scheduler.block_manager import BlockManager, TokenRange
from toolkit_lm.scheduler.block_pool import BlockPool
from toolkit_lm.scheduler.deadlines import Deadlines
from toolkit_lm.scheduler.limits import RequestLimits
from toolkit_lm.scheduler.policy import POLICIES
from toolkit_lm.scheduler.preemption import PreemptionCost
from toolkit_lm.scheduler.prefix import root_hash
from toolkit_lm.scheduler.request import Request, Sequence


class Scheduler:
    """Continuous batching under one token budget.

    A sequence is "computed so far" and "wanted": prefill, chunked prefill and decode are the same thing. `schedule` advances the
    computed counts; `update` brings the drawn tokens. A next step may be planned before the results of the one before are in: the tokens
    that it will draw are placeholders until then.
    """

    def __init__(
        self,
        config: VllmConfig,
        kv_cache: KVCacheConfig,
        salt: str = "",
        pooling: Mapping[PoolingTask, PoolingRules] = MappingProxyType({}),
    ) -> None:
        """`salt`: goes into all hashes of cached prefixes. `pooling`: the pooling tasks that the model serves."""
        self.limits = RequestLimits(config, kv_cache, pooling)
        self.pooling = pooling
        self.chunked = config.scheduler.enable_chunked_prefill is not False
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.max_num_batched_tokens = config.scheduler.token_budget
        self.default_seed = config.model.seed
        self.salt = salt
        self.blocks = BlockManager(
            BlockPool(kv_cache.num_blocks), [group.spec for group in kv_cache.groups], BlockPool(kv_cache.num_host_blocks)
        )
        self.caching = config.cache.enable_prefix_caching is not False and self.blocks.has_tables
        self.policy = POLICIES[config.scheduler.scheduling_policy]
        self.preemption = PreemptionCost(config.scheduler.preemption_mode, kv_cache)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        """In the policy's order."""
        self.running: list[Request] = []
        """In the policy's order: blocks are taken from the last."""
        self.suspects: list[str] = []
        """Requests of a step that failed: each is computed alone until it has drawn a token."""
        self.events: list[RequestEvent] = []
        """What happened since the engine last took them."""
        self.outputs: list[EngineOutput] = []
        """Of requests that ended between steps, since the engine last took them."""
        self._sequences: dict[int, Sequence] = {}
        """The unfinished ones, by seq_id."""
        self._deadlines = Deadlines()
        self._seq_ids = count()
        self._dropped: list[int] = []
        """Sequences that the runner still holds, to be dropped by the next plan."""

    # Requests come and go

    def add(self, message: EngineRequest) -> None:
        """Queues a request. Raises RequestError."""
        if message.request_id in self.requests:
            raise RequestError(f"request id {message.request_id!r} is in use.", "request_id")
        root = root_hash(self.salt, message.cache_salt)
        request = Request(message, self.limits.check(message), self._seq_ids, root, self.default_seed)
        self.requests[request.request_id] = request
        self._sequences.update({seq.seq_id: seq for seq in request.sequences})
        if request.deadline is not None:
            self._deadlines.add(request.deadline, request.request_id)
        insort(self.waiting, request, key=self.policy)
        self._event("queued", request)

    def finish(self, request_id: str, reason: FinishReason, index: int | None = None) -> None:
        """Ends a request, or one sequence of it, from outside: an abort, a stop text. Unknown or finished ones are no error."""
        request = self.requests.get(request_id)
        if request is not None:
            for seq in request.unfinished:
                # The beams of a search end together.
                if index is None or seq.index == index or request.search:
                    self._finish_sequence(seq, reason)

    def fail(self, request_id: str, error: str) -> list[EngineOutput]:
        """Ends a request with an error. What its blocks hold is in doubt, so that no other will find it."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        for seq in request.unfinished:
            self.blocks.forget_contents(seq.seq_id)
        return self._end(request, "error", error)

    def reset_prefix_cache(self) -> None:
        """Nobody will find what blocks hold now. Requests under way go on."""
        self.blocks.pool.forget_all()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def num_running(self) -> int:
        """Sequences of running requests; of a beam search, as many as it can come to have."""
        return sum(r.num_rows for r in self.running)

    def load(self) -> LoadEvent:
        """How full the engine is."""
        pool, host_pool = self.blocks.pool, self.blocks.host_pool
        return LoadEvent(
            time=time.monotonic(),
            num_running=self.num_running,
            num_waiting=len(self.waiting),
            num_used_blocks=pool.num_used,
            num_total_blocks=pool.num_blocks,
            num_used_host_blocks=host_pool.num_used,
            num_total_host_blocks=host_pool.num_blocks,
        )

    # One step

    def schedule(self) -> StepPlan | None:
        """Plans the next step and advances the computed counts. None: there is nothing to do before the results of a planned one."""
        now = time.monotonic()
        for request_id in self._deadlines.passed(now):
            request = self.requests.get(request_id)
            # Another request may have taken over the id of one that has ended.
            if request is not None and request.deadline is not None and request.deadline <= now:
                self.outputs += self._end(request, "timeout")
        plan = StepPlan(dropped=self._dropped)
        self._dropped = plan.dropped
        self.suspects = [request_id for request_id in self.suspects if request_id in self.requests]
        if self.suspects:
            self._schedule_alone(plan, self.requests[self.suspects[0]])
        else:
            budget, preempted = self._schedule_running(plan, self.max_num_batched_tokens)
            if not preempted:
                self._schedule_waiting(plan, budget)
        if not (plan.scheduled or plan.swap_out):
            return None
        self._dropped = []
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Takes in the tokens that a step drew; ends the sequences that are complete. Steps come in the order of their plans."""
        outputs = []
        logprobs = result.logprobs or [None] * len(plan.scheduled)
        for row, tokens, row_logprobs in zip(plan.scheduled, result.token_ids, logprobs, strict=True):
            seq = self._sequences.get(row.seq_id)
            if seq is None:
                # It ended while the step was on its way.
                continue
            prompt_logprobs = result.prompt_logprobs.get(row.seq_id, [])
            seq.request.num_prompt_logprobs += len(prompt_logprobs)
            if row.seq_id in result.errors:
                outputs += self.fail(seq.request.request_id, result.errors[row.seq_id])
            elif row.seq_id in result.pooled:
                outputs.append(self._pooled(seq, result.pooled[row.seq_id]))
            elif row.samples and seq.request.search:
                outputs += self._advance(seq, seq.request.search, result.candidates[row.seq_id])
            elif row.samples:
                seq.mirostat_mu = result.mirostat_mu.get(row.seq_id)
                seq.num_placeholders -= 1
                seq.token_ids += tokens
                self._publish(seq)
                outputs.append(self._output(seq, tokens, None if row_logprobs is None else [row_logprobs], prompt_logprobs))
                self._clear(seq.request)
            elif prompt_logprobs:
                outputs.append(EngineOutput(request_id=seq.request.request_id, index=seq.index, prompt_logprobs=prompt_logprobs))
        return outputs

    def requests_in(self, plan: StepPlan) -> list[str]:
        """The unfinished requests that a plan computes, in its order."""
        seqs = (self._sequences.get(row.seq_id) for row in plan.scheduled)
        return list(dict.fromkeys(seq.request.request_id for seq in seqs if seq is not None))

    def reset_after_failure(self, plans: Collection[StepPlan]) -> None:
        """Steps failed, or were interrupted, somewhere on their way: nothing that the runner holds can be relied on.

        All requests are preempted, and so computed again from their tokens; what blocks hold is forgotten. It relies on nothing that
        an interrupt may have left half done.
        """
        for plan in plans:
            self._dropped += plan.dropped
        self._dropped += self._sequences
        self.blocks.reset()
        self.running, self.waiting = [], sorted(self.requests.values(), key=self.policy)
        for request in self.waiting:
            request.swapped = False
            for seq in request.unfinished:
                seq.on_worker, seq.num_computed_tokens, seq.num_placeholders, seq.candidates = False, 0, 0, None

    def drop_plan(self) -> StepPlan:
        """A plan that computes nothing: the runner forgets what it holds in vain."""
        plan, self._dropped = StepPlan(dropped=self._dropped), []
        return plan

    # Planning

    def _schedule_running(self, plan: StepPlan, budget: int) -> tuple[int, bool]:
        """Returns what is left of the budget, and whether a request was preempted."""
        if self.blocks.has_windows:
            for request in self.running:
                self._trim(request)
        preempted = False
        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            writes = self._writes(request, budget)
            if self.blocks.blocks_needed(writes) > self.blocks.pool.num_free:
                # The last in the policy's order gives way; when it is this one, nobody behind it is left to serve.
                self._preempt(plan, self.running[-1])
                preempted = True
                continue
            budget -= self._commit(plan, request, writes)
            position += 1
        return budget, preempted

    def _schedule_waiting(self, plan: StepPlan, budget: int) -> None:
        num_running = self.num_running
        while self.waiting and budget > 0:
            request = self.waiting[0]
            if num_running + request.num_rows > self.max_num_seqs:
                break
            if not self._may_cut(request) and request.leader.num_pending_tokens > budget:
                break
            num_cached = self._num_cached(request)
            # Leave each running sequence a block to grow into: admitting one that is preempted at once would waste its prefill.
            reserve = num_running if self.blocks.has_tables else 0
            if self._blocks_to_admit(request, budget, num_cached) + reserve > self.blocks.pool.num_free:
                if self.running or not self._discard_swapped():
                    break
                continue
            num_running += request.num_rows
            self._admit(plan, request, num_cached)
            budget -= self._commit(plan, request, self._writes(request, budget))

    def _schedule_alone(self, plan: StepPlan, request: Request) -> None:
        """One suspect; all others wait without blocks, so that it fits. It computes all of its keys and values itself."""
        if request in self.waiting:
            self._admit(plan, request, num_cached=0)
        self._trim(request)
        self._commit(plan, request, self._writes(request, self.max_num_batched_tokens))

    def _clear(self, request: Request) -> None:
        """A suspect has drawn a token: it is not to blame, and makes room for the next one."""
        if self.suspects and self.suspects[0] == request.request_id:
            self.suspects.pop(0)
            if request.unfinished:
                self._requeue(request)
                self._start_over(request)

    def _num_cached(self, request: Request) -> int:
        """Tokens of a waiting request's leader whose keys and values are in the cache. Its last token is computed in any case."""
        # Whoever wants log probabilities of the prompt needs its hidden states.
        if not self.caching or request.swapped or request.params.prompt_logprobs is not None:
            return 0
        if request.pooling is not None and not self.pooling[request.pooling.task].reads_prefix_cache:
            return 0
        # Those that fork from the leader need the window before the prompt's last token.
        known = request.leader.num_tokens if len(request.unfinished) == 1 else request.num_prompt_tokens
        return self.blocks.find_prefix(request.leader.block_hashes, known - 1)

    def _blocks_to_admit(self, request: Request, budget: int, num_cached: int) -> int:
        """Free blocks that a waiting request takes: for the whole of its prompt, not only the first chunk."""
        growth = self.blocks.blocks_needed(self._writes(request, budget))
        if request.swapped:
            return self.blocks.num_swapped(request.request_id, request.seq_ids) + growth
        leader = request.leader
        whole = self.blocks.blocks_for(leader.num_tokens, self.max_num_batched_tokens)
        return whole - self.blocks.num_shared(leader.block_hashes, num_cached) if num_cached else max(whole, growth)

    def _admit(self, plan: StepPlan, request: Request, num_cached: int) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=self.policy)
        if request.swapped:
            plan.swap_in += self.blocks.swap_in(request.request_id, request.seq_ids)
            request.swapped = False
        elif num_cached:
            self.blocks.adopt(request.leader.seq_id, request.leader.block_hashes, num_cached)
            request.leader.num_computed_tokens = num_cached
        if request.scheduled_time is None:
            request.scheduled_time = time.monotonic()
            request.num_cached_tokens = num_cached
            self._event("scheduled", request)

    def _writes(self, request: Request, budget: int) -> list[TokenRange]:
        """What each of a request's sequences would compute now, within the budget."""
        writes: list[TokenRange] = []
        ready = list(self._ready(request))
        if request.search and len(ready) > budget:
            # Beams advance together: those that are computed would wait for the others.
            return writes
        for seq in ready:
            num_tokens = min(seq.num_pending_tokens, budget)
            if num_tokens > 0 and (num_tokens == seq.num_pending_tokens or self._may_cut(request)):
                budget -= num_tokens
                writes.append(TokenRange(seq.seq_id, seq.num_computed_tokens, seq.num_computed_tokens + num_tokens))
        return writes

    def _may_cut(self, request: Request) -> bool:
        """A prompt may be computed in several steps."""
        return self.chunked and (request.pooling is None or self.pooling[request.pooling.task].chunkable)

    @staticmethod
    def _ready(request: Request) -> Iterable[Sequence]:
        """The sequences that can compute: the leader, and those that have forked from it; but none that waits for its last token.

        Nor a beam that waits for any: which token it will be, and of how many beams, is known when all have their candidates.
        """
        leader = request.leader
        for seq in request.unfinished:
            forked = seq is leader or seq.num_computed_tokens > 0 or request.num_prompt_tokens == 1
            drawn = request.pooling is None and seq.num_tokens - request.num_prompt_tokens >= request.max_tokens
            if forked and not drawn and not (request.search and seq.num_placeholders):
                yield seq

    def _commit(self, plan: StepPlan, request: Request, writes: list[TokenRange]) -> int:
        """Adds a request's rows to the plan; returns their number of tokens."""
        for write in writes:
            seq = self._sequences[write.seq_id]
            growth = self.blocks.append_slots(write)
            plan.copies += growth.copies
            if seq.on_worker:
                plan.moves += growth.moves
            else:
                plan.new.append(self._new_sequence(seq))
                seq.on_worker = True
            seq.num_computed_tokens = write.end
            # Whoever comes later in this very step may share what it writes: keys and values are written before they are read.
            self._publish(seq)
            samples = write.end == seq.num_tokens and request.pooling is None
            if samples:
                seq.num_placeholders += 1
            plan.scheduled.append(ScheduledSequence(seq.seq_id, write.end - write.start, growth.new_blocks, samples))
        self._fork_from_leader(request)
        return sum(w.end - w.start for w in writes)

    def _publish(self, seq: Sequence) -> None:
        if self.caching:
            self.blocks.publish(seq.seq_id, seq.block_hashes, min(seq.num_computed_tokens, len(seq.token_ids)))

    def _fork_from_leader(self, request: Request) -> None:
        """Once the leader has computed the prompt, the others share it, but for its last token: they compute that again to draw from it.

        It happens with the step that completes the prompt, since the leader may end with that step.
        """
        leader, shared = request.leader, request.num_prompt_tokens - 1
        if len(request.unfinished) == 1 or leader.num_computed_tokens <= shared or shared == 0:
            return
        for seq in request.unfinished:
            if seq is not leader and seq.num_computed_tokens == 0:
                self.blocks.fork(leader.seq_id, seq.seq_id, shared)
                seq.num_computed_tokens = shared

    def _new_sequence(self, seq: Sequence) -> NewSequence:
        request = seq.request
        return NewSequence(
            seq_id=seq.seq_id,
            token_ids=list(seq.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=seq.num_computed_tokens,
            # No query reads what a window has left behind: any block will do for it.
            block_tables=[[max(b, 0) for b in self.blocks.get_block_table(seq.seq_id, g)] for g in range(len(self.blocks.specs))],
            params=request.params,
            seed=seq.seed,
            stop_token_ids=sorted(request.eos_token_ids | request.stop_token_ids),
            words=request.words,
            mirostat_mu=seq.mirostat_mu,
            num_prompt_logprobs=request.num_prompt_logprobs,
            num_candidates=request.search.num_candidates if request.search else 0,
            pooling=request.pooling,
            second_text_start=request.second_text_start,
            pooling_start=request.pooling_start,
            num_attended=request.num_attended,
        )

    def _trim(self, request: Request) -> None:
        for seq in request.unfinished:
            self.blocks.trim(seq.seq_id, seq.num_computed_tokens)

    # Preemption

    def _preempt(self, plan: StepPlan, request: Request) -> None:
        """Takes a running request's blocks. It waits, and is computed again from its tokens, or comes back from the host."""
        self._requeue(request)
        num_tokens = sum(seq.num_computed_tokens for seq in request.unfinished)
        # What a pooler keeps of a sequence between its chunks is lost with its row.
        if request.pooling is None and self.preemption.prefers_swap(
            num_tokens, self.blocks.num_own_blocks(request.request_id, request.seq_ids)
        ):
            copies = self.blocks.swap_out(request.request_id, request.seq_ids)
            if copies is not None:
                plan.swap_out += copies
                request.swapped = True
                self._event("preempted", request)
                return
        self._start_over(request)
        self._event("preempted", request)

    def _requeue(self, request: Request) -> None:
        """From the batch back to the queue; the runner forgets it."""
        self.running.remove(request)
        insort(self.waiting, request, key=self.policy)
        for seq in request.unfinished:
            self._drop(seq)

    def _start_over(self, request: Request) -> None:
        """A waiting request gives up what is computed of it."""
        request.swapped = False
        for seq in request.unfinished:
            self.blocks.free(seq.seq_id)
            seq.num_computed_tokens = 0
            if request.search:
                seq.num_placeholders, seq.candidates = 0, None

    def _discard_swapped(self) -> bool:
        """Swapped requests keep the blocks that they share: when these are in everybody's way, the last of them starts over."""
        swapped = [request for request in self.waiting if request.swapped]
        if swapped:
            self._start_over(swapped[-1])
        return bool(swapped)

    def _drop(self, seq: Sequence) -> None:
        if seq.on_worker:
            self._dropped.append(seq.seq_id)
            seq.on_worker = False

    # Results

    def _advance(self, beam: Sequence, search: BeamSearch, candidates: Candidates) -> list[EngineOutput]:
        """One more beam of a request has its candidates; with the last of them the search goes a token on, to other beams, or ends."""
        request = beam.request
        if beam.num_placeholders == 0:
            # It was preempted meanwhile, and will be computed again.
            return []
        beam.candidates = candidates
        self._first_token(request)
        beams = request.sequences
        known = [one.candidates for one in beams if one.candidates is not None]
        if len(known) < len(beams):
            return []
        extensions = search.advance([one.beam for one in beams], known)
        if not extensions:
            outputs = self._end_search(request, search)
        else:
            outputs = []
            request.sequences = [beams[e.parent].extended(next(self._seq_ids), e.token_id, e.logprob) for e in extensions]
            request.unfinished = request.sequences
            for extension, child in zip(extensions, request.sequences, strict=True):
                self.blocks.fork(beams[extension.parent].seq_id, child.seq_id, child.num_computed_tokens)
                self._sequences[child.seq_id] = child
            for one in beams:
                self._release(one)
        self._clear(request)
        return outputs

    def _end_search(self, request: Request, search: BeamSearch) -> list[EngineOutput]:
        n = request.params.n
        found = search.hypotheses[:n]
        if len(found) < n:
            return self._end(request, "error", f"the request's sampling parameters leave {len(found)} sequences, and n is {n}")
        for seq in request.unfinished:
            self._finish_sequence(seq, found[0].finish_reason)
        return [
            EngineOutput(
                request_id=request.request_id,
                index=index,
                token_ids=one.token_ids,
                finish_reason=one.finish_reason,
                stop_token_id=one.token_ids[-1] if one.token_ids[-1] in request.stop_token_ids else None,
                num_cached_tokens=request.num_cached_tokens,
                cumulative_logprob=one.logprob,
                score=one.score,
            )
            for index, one in enumerate(found)
        ]

    def _output(
        self, seq: Sequence, tokens: list[int], logprobs: list[TokenLogprobs] | None, prompt_logprobs: list[TokenLogprobs]
    ) -> EngineOutput:
        request = seq.request
        self._first_token(request)
        output = EngineOutput(
            request_id=request.request_id,
            index=seq.index,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens,
        )
        last = tokens[-1]
        if last in request.eos_token_ids or last in request.stop_token_ids:
            output.finish_reason = "stop"
            output.stop_token_id = last if last in request.stop_token_ids else None
        elif seq.num_output_tokens >= request.max_tokens:
            output.finish_reason = "length"
        if output.finish_reason is not None:
            self._finish_sequence(seq, output.finish_reason)
        return output

    def _pooled(self, seq: Sequence, result: Array) -> EngineOutput:
        request = seq.request
        self._finish_sequence(seq, "stop")
        self._clear(request)
        return EngineOutput(
            request_id=request.request_id,
            index=seq.index,
            pooled=result,
            finish_reason="stop",
            num_cached_tokens=request.num_cached_tokens,
        )

    def _first_token(self, request: Request) -> None:
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
            self._event("first_token", request)

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> list[EngineOutput]:
        """Ends all that is unfinished of a request."""
        ended = request.unfinished
        for seq in ended:
            self._finish_sequence(seq, reason)
        indices = range(request.params.n) if request.search else [seq.index for seq in ended]
        return [EngineOutput(request_id=request.request_id, index=index, finish_reason=reason, error=error) for index in indices]

    def _finish_sequence(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        self._release(seq)
        request = seq.request
        request.unfinished = [other for other in request.unfinished if other is not seq]
        if not request.unfinished:
            del self.requests[request.request_id]
            self.blocks.free_cross(request.request_id)
            (self.running if request in self.running else self.waiting).remove(request)
            self._event("aborted" if reason in ("abort", "timeout") else "finished", request, reason)

    def _release(self, seq: Sequence) -> None:
        seq.num_placeholders = 0
        self.blocks.free(seq.seq_id)
        self._drop(seq)
        del self._sequences[seq.seq_id]

    def _event(self, kind: RequestEventKind, request: Request, reason: FinishReason | None = None) -> None:
        self.events.append(
            RequestEvent(
                kind=kind,
                request_id=request.request_id,
                time=time.monotonic(),
                arrival_time=request.arrival_time,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens,
                num_output_tokens=request.num_output_tokens,
                num_sequences=request.params.n if request.search else len(request.sequences),
                scheduled_time=request.scheduled_time,
                first_token_time=request.first_token_time,
                finish_reason=reason,
                context=request.context,
            )
        )
