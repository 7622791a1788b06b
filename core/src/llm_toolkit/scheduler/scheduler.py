"""The scheduler: which tokens of which sequences the next step computes."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable
from itertools import count

from llm_toolkit.attention import KVCacheConfig
from llm_toolkit.config import VllmConfig
from llm_toolkit.errors import ContextLengthError, RequestError
from llm_toolkit.events import RequestEvent, RequestEventKind
from llm_toolkit.messages import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    NewSequence,
    ScheduledSequence,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from llm_toolkit.scheduler.block_manager import BlockManager, Write
from llm_toolkit.scheduler.block_pool import BlockPool
from llm_toolkit.scheduler.policy import POLICIES
from llm_toolkit.scheduler.request import Request, Sequence


class Scheduler:
    """Continuous batching under one token budget.

    A sequence is "computed so far" and "wanted": prefill, chunked prefill and decode are the same thing. `schedule` advances the
    computed counts; `update` brings the drawn tokens.
    """

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig) -> None:
        self.max_model_len = config.max_model_len
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.max_num_batched_tokens = config.scheduler.max_num_batched_tokens
        self.default_seed = config.model.seed
        self.blocks = BlockManager(BlockPool(kv_cache.num_blocks), [group.spec for group in kv_cache.groups])
        self.policy = POLICIES[config.scheduler.scheduling_policy]
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        """In the policy's order."""
        self.running: list[Request] = []
        """In the policy's order: blocks are taken from the last."""
        self.events: list[RequestEvent] = []
        """What happened since the engine last took them."""
        self._seq_ids = count()
        self._dropped: list[int] = []
        """Sequences that the runner still holds, to be dropped by the next plan."""

    # Requests come and go

    def check(self, message: EngineRequest) -> int:
        """Most output tokens per sequence of a request. Raises RequestError for one that could never be served. Thread-safe."""
        prompt, params = len(message.prompt_token_ids), message.params
        if prompt == 0:
            raise RequestError("the prompt is empty: it needs at least one token.", "prompt")
        if prompt >= self.max_model_len:
            limit = f"with at least one token of output it must stay within max_model_len, {self.max_model_len}"
            raise ContextLengthError(f"the prompt has {prompt} tokens; {limit}.", "prompt")
        max_tokens = min(params.max_tokens or self.max_model_len, self.max_model_len - prompt)
        if params.min_tokens > max_tokens:
            room = f"after a prompt of {prompt} tokens max_model_len leaves room for {max_tokens}"
            raise RequestError(f"min_tokens is {params.min_tokens}, but {room}.", "min_tokens")
        if params.n > self.max_num_seqs:
            raise RequestError(f"n is {params.n}, but a step holds at most {self.max_num_seqs} sequences (max_num_seqs).", "n")
        needed, total = self._most_blocks(prompt, max_tokens, params.n), self.blocks.pool.num_blocks
        if needed > total:
            raise RequestError(
                f"{params.n} sequences of up to {prompt + max_tokens} tokens take {needed} KV cache blocks, but there are {total}: "
                "lower n or max_tokens.",
                "n" if params.n > 1 else "max_tokens",
            )
        return max_tokens

    def add(self, message: EngineRequest) -> None:
        """Queues a request. Raises RequestError."""
        if message.request_id in self.requests:
            raise RequestError(f"request id {message.request_id!r} is in use.", "request_id")
        request = Request(message, self.check(message), self._seq_ids, self.default_seed)
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=self.policy)
        self._event("queued", request)

    def finish(self, request_id: str, reason: FinishReason, index: int | None = None) -> None:
        """Ends a request, or one sequence of it, from outside: an abort, a stop text. Unknown or finished ones are no error."""
        request = self.requests.get(request_id)
        if request is not None:
            for seq in request.unfinished:
                if index is None or seq.index == index:
                    self._finish_sequence(seq, reason)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def num_running(self) -> int:
        """Sequences of running requests."""
        return sum(len(r.unfinished) for r in self.running)

    # One step

    def schedule(self) -> StepPlan:
        """Plans the next step and advances the computed counts. The plan is empty when there is nothing to do."""
        plan = StepPlan(dropped=self._dropped)
        self._dropped = plan.dropped
        budget, preempted = self._schedule_running(plan, self.max_num_batched_tokens)
        if not preempted:
            self._schedule_waiting(plan, budget)
        self._dropped = []
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Takes in the tokens that a step drew; ends the sequences that are complete."""
        outputs = []
        by_id = {seq.seq_id: seq for request in self.running for seq in request.unfinished}
        logprobs = result.logprobs or [None] * len(plan.scheduled)
        for row, tokens, row_logprobs in zip(plan.scheduled, result.token_ids, logprobs, strict=True):
            seq = by_id.get(row.seq_id)
            if seq is None or seq.finish_reason is not None:
                continue
            prompt_logprobs = result.prompt_logprobs.get(row.seq_id, [])
            seq.request.num_prompt_logprobs += len(prompt_logprobs)
            if row.seq_id in result.errors:
                outputs += self._fail(seq.request, result.errors[row.seq_id])
            elif row.samples:
                seq.mirostat_mu = result.mirostat_mu.get(row.seq_id)
                seq.num_placeholders -= 1
                seq.token_ids += tokens
                outputs.append(self._output(seq, tokens, None if row_logprobs is None else [row_logprobs], prompt_logprobs))
            elif prompt_logprobs:
                outputs.append(EngineOutput(request_id=seq.request.request_id, index=seq.index, prompt_logprobs=prompt_logprobs))
        return outputs

    def give_up(self, plan: StepPlan) -> None:
        """A step failed, or was interrupted, somewhere on its way: nothing that the runner holds can be relied on.

        All running requests are preempted, and so computed again from their tokens.
        """
        self._dropped += plan.dropped
        for request in reversed(self.running.copy()):
            self._preempt(request)

    # Planning

    def _schedule_running(self, plan: StepPlan, budget: int) -> tuple[int, bool]:
        """Returns what is left of the budget, and whether a request was preempted."""
        for request in self.running:
            for seq in request.unfinished:
                self.blocks.trim(seq.seq_id, seq.num_computed_tokens)
        preempted = False
        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            writes = self._writes(request, budget)
            if self.blocks.blocks_needed(writes) > self.blocks.pool.num_free:
                # The last in the policy's order gives way; when it is this one, nobody behind it is left to serve.
                self._preempt(self.running[-1])
                preempted = True
                continue
            budget -= self._commit(plan, request, writes)
            position += 1
        return budget, preempted

    def _schedule_waiting(self, plan: StepPlan, budget: int) -> None:
        num_running = self.num_running
        while self.waiting and budget > 0:
            request = self.waiting[0]
            num_seqs = len(request.unfinished)
            if num_running + num_seqs > self.max_num_seqs:
                break
            writes = self._writes(request, budget)
            # The whole prompt must fit, not only its first chunk, and leave each running sequence a block to grow into: admitting one
            # that is preempted at once would waste its prefill.
            whole = self.blocks.blocks_for(request.leader.num_tokens, self.max_num_batched_tokens)
            needed = max(whole, self.blocks.blocks_needed(writes))
            if needed + num_running > self.blocks.pool.num_free:
                break
            self.waiting.pop(0)
            insort(self.running, request, key=self.policy)
            num_running += num_seqs
            if request.scheduled_time is None:
                request.scheduled_time = time.monotonic()
                self._event("scheduled", request)
            budget -= self._commit(plan, request, writes)

    def _writes(self, request: Request, budget: int) -> list[Write]:
        """What each of a request's sequences would compute now, within the budget."""
        writes = []
        for seq in self._ready(request):
            num_tokens = min(seq.num_pending_tokens, budget)
            if num_tokens > 0:
                budget -= num_tokens
                writes.append(Write(seq.seq_id, seq.num_computed_tokens, seq.num_computed_tokens + num_tokens))
        return writes

    @staticmethod
    def _ready(request: Request) -> Iterable[Sequence]:
        """The sequences that can compute: the leader, and those that have forked from it."""
        leader = request.leader
        return (s for s in request.unfinished if s is leader or s.num_computed_tokens > 0 or request.num_prompt_tokens == 1)

    def _commit(self, plan: StepPlan, request: Request, writes: list[Write]) -> int:
        """Adds a request's rows to the plan; returns their number of tokens."""
        seqs = {s.seq_id: s for s in request.unfinished}
        for write in writes:
            seq = seqs[write.seq_id]
            growth = self.blocks.append_slots(write)
            plan.copies += growth.copies
            if seq.held:
                plan.moves += growth.moves
            else:
                plan.new.append(self._new_sequence(seq))
                seq.held = True
            seq.num_computed_tokens = write.end
            samples = write.end == seq.num_tokens
            if samples:
                seq.num_placeholders += 1
            plan.scheduled.append(ScheduledSequence(seq.seq_id, write.end - write.start, growth.new_blocks, samples))
        self._fork_from_leader(request)
        return sum(w.end - w.start for w in writes)

    def _fork_from_leader(self, request: Request) -> None:
        """Once the leader has computed the prompt, the others share it, but for its last token: they compute that again to draw from it.

        It happens with the step that completes the prompt, since the leader may end with that step.
        """
        leader, shared = request.leader, request.num_prompt_tokens - 1
        if leader.num_computed_tokens <= shared or shared == 0:
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
        )

    def _preempt(self, request: Request) -> None:
        """Takes a running request's blocks; it waits, and is computed again from its tokens."""
        self.running.remove(request)
        for seq in request.unfinished:
            self._release(seq)
            seq.num_computed_tokens = seq.num_placeholders = 0
        insort(self.waiting, request, key=self.policy)
        self._event("preempted", request)

    def _release(self, seq: Sequence) -> None:
        self.blocks.free(seq.seq_id)
        if seq.held:
            self._dropped.append(seq.seq_id)
            seq.held = False

    def _most_blocks(self, prompt: int, max_tokens: int, n: int) -> int:
        """Blocks that a request can come to own. The last output token's key and value are never stored."""
        total = 0
        for spec in self.blocks.specs:
            each = spec.blocks_for(prompt + max_tokens - 1, self.max_num_batched_tokens)
            whole = -(-(prompt + max_tokens - 1) // spec.block_size)
            shared = (prompt - 1) // spec.block_size if n > 1 and each == whole else 0
            total += shared + n * (each - shared)
        return total

    # Results

    def _output(
        self, seq: Sequence, tokens: list[int], logprobs: list[TokenLogprobs] | None, prompt_logprobs: list[TokenLogprobs]
    ) -> EngineOutput:
        request = seq.request
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
            self._event("first_token", request)
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

    def _fail(self, request: Request, error: str) -> list[EngineOutput]:
        """One sequence's error ends its request, and no other."""
        failed = request.unfinished
        for seq in failed:
            self._finish_sequence(seq, "error")
        return [EngineOutput(request_id=request.request_id, index=s.index, finish_reason="error", error=error) for s in failed]

    def _finish_sequence(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        seq.num_placeholders = 0
        self._release(seq)
        request = seq.request
        if not request.unfinished:
            del self.requests[request.request_id]
            (self.running if request in self.running else self.waiting).remove(request)
            self._event("finished", request, reason)

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
                num_sequences=len(request.sequences),
                scheduled_time=request.scheduled_time,
                first_token_time=request.first_token_time,
                finish_reason=reason,
            )
        )
