"""The scheduler: chooses the tokens of each sequence that the next step computes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence as Collection
from itertools import count, islice
from types import MappingProxyType

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.kv import KVCacheConfig, KVTier
from toolkit_lm.kv.block_manager import BlockManager
from toolkit_lm.messages import (
    Candidates,
    EngineOutput,
    EngineRequest,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from toolkit_lm.params import FinishReason, leave_too_little
from toolkit_lm.scheduler.beam import BeamSearch
from toolkit_lm.scheduler.beam_step import BeamStep
from toolkit_lm.scheduler.deadlines import Deadlines
from toolkit_lm.scheduler.draft_budget import DraftBudget, DraftingFacts
from toolkit_lm.scheduler.encoder_cache import EncoderCache
from toolkit_lm.scheduler.endings import Endings
from toolkit_lm.scheduler.event_log import EventLog
from toolkit_lm.scheduler.planner import MEDIA, PlannerError, Planners
from toolkit_lm.scheduler.preemption import PreemptionCost
from toolkit_lm.scheduler.quarantine import Quarantine
from toolkit_lm.scheduler.request import Refused, Request, Sequence
from toolkit_lm.scheduler.request_blocks import Admission, Admitted, RequestBlocks
from toolkit_lm.scheduler.roster import Roster, SchedulingPolicy
from toolkit_lm.scheduler.rules import RequestRules

_MOST_OVERTAKEN = 16
"""How many waiting requests are still tried behind the first that does not fit."""


class Scheduler:
    """Continuous batching under one token budget.

    A sequence has computed tokens and wanted tokens: prefill, chunked prefill and decode are the
    same thing. `schedule` advances the computed counts; `update` adds the sampled tokens. A step
    may be planned before the results of the previous one are in. The tokens that the previous step
    will sample are placeholders until then.

    The class decides which requests compute. Other modules of the folder answer its questions.
    """

    paused = False
    """Nothing is planned. Requests stay as they are."""

    def __init__(
        self,
        config: VllmConfig,
        kv_cache: KVCacheConfig,
        policy: SchedulingPolicy,
        salt: str = "",
        *,
        whole_items: bool = False,
        planners: Planners | None = None,
        tiers: Mapping[str, KVTier] = MappingProxyType({}),
        drafting: DraftingFacts | None = None,
    ) -> None:
        """`salt`: salt of all hashes of cached prefixes. `whole_items`: no chunk ends inside a
        multimodal item. `planners`: planners of plugins' parts. `tiers`: KV tiers, by name.
        `drafting`: facts of the worker's drafters."""
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.max_num_batched_tokens = config.scheduler.token_budget
        self.policy = policy
        self.roster = Roster(policy)
        self.blocks = BlockManager(kv_cache)
        self.preemption = PreemptionCost(config.scheduler.preemption_mode, kv_cache)
        budget = self.max_num_batched_tokens
        self.items = EncoderCache(config.encoder_cache_embeds, budget, whole_items=whole_items)
        self.planners = planners or Planners()
        self.planners.add(MEDIA, self.items)
        self.request_blocks = RequestBlocks(
            config, self.blocks, self.preemption, self.roster, self.planners, tiers
        )
        self.rules = RequestRules(
            salt=salt,
            default_seed=config.model.seed,
            chunked=config.scheduler.enable_chunked_prefill is not False,
            needs_tokens=config.parallel.pipeline_parallel_size > 1
            or bool(config.scheduler.drafter),
            forks_anywhere=self.blocks.forks_anywhere,
            max_drafts=self.blocks.max_drafts,
            whole_items=whole_items,
            next_stop=self.request_blocks.next_stop,
        )
        self.tiers = self.request_blocks.tiers
        self.admission = Admission(config, self.request_blocks)
        drafts = config.scheduler
        self.draft_budget = (
            DraftBudget(
                drafting or DraftingFacts(),
                all_drafts=drafts.draft_budget == "all",
                overlaps=config.parallel.pipeline_parallel_size == 1,
            )
            if drafts.drafter
            else None
        )
        self.quarantine = Quarantine()
        self.events = EventLog()
        self.endings = Endings(self.roster, self.request_blocks, self.quarantine, self.events)
        self.outputs: list[EngineOutput] = []
        """Outputs of requests that ended between steps, since the engine last took them."""
        self.has_failed = False
        """The next plan follows a failed step."""
        self._deadlines = Deadlines()
        self._seq_ids = count()

    # Requests come and go

    def add(self, message: EngineRequest) -> None:
        """Queues a request that the front has validated. Raises RequestError if the id is in use,
        and what the policy raises."""
        if message.request_id in self.roster.requests:
            raise RequestError(f"request id {message.request_id!r} is in use.", "request_id")
        request = Request(message, self._seq_ids, self.rules)
        if request.media_end or request.inputs.parts or self.planners.of_plugins:
            self.planners.prepare(request)
        if self.draft_budget is not None:
            self.draft_budget.add(request)
        self.roster.add(request)
        if request.deadline is not None:
            self._deadlines.add(request.deadline, request.request_id)
        self.events.add("queued", request)

    def finish(self, request_id: str, reason: FinishReason, index: int | None = None) -> None:
        """Ends a request, or one of its sequences, from outside: for an abort or a stop string.
        Unknown and finished ones are accepted."""
        request = self.roster.requests.get(request_id)
        if request is not None:
            # The beams of a search end together.
            self.endings.finish(
                request,
                [seq for seq in request.unfinished if index in (None, seq.index) or request.search],
                reason,
            )

    def fail(self, request_id: str, error: str) -> list[EngineOutput]:
        """Ends a request with an error. The contents of its blocks are in doubt, so no other
        request will find them."""
        request = self.roster.requests.get(request_id)
        if request is None:
            return []
        self.request_blocks.forget_contents(request)
        return self.endings.end(request, "error", error)

    # One step

    def schedule(self) -> StepPlan | None:
        """Plans the next step, and advances the computed counts. None: there is nothing to do
        before the results of a planned step."""
        now = time.monotonic()
        if now >= self._deadlines.earliest:
            for request in self._deadlines.passed(now, self.roster.requests):
                self.outputs += self.endings.end(request, "timeout")
        if self.planners.failed:
            self._fail_parts()
        if self.roster.loading:
            self.request_blocks.end_late_loads(now)
        if self.paused:
            return None
        # Sequences that are dropped during planning go into this very plan.
        plan = StepPlan(dropped=self.roster.dropped)
        if self.draft_budget is not None:
            self.draft_budget.begin_step(self.roster.running)
            plan.asks_drafters = self.draft_budget.is_asking
            plan.max_drafts = self.draft_budget.limits
        if self.quarantine.quarantined:
            self._schedule_alone(plan, self.roster.requests[self.quarantine.quarantined[0]])
        else:
            asked = self.roster.waiting[: self.max_num_seqs]
            waiting = self.policy.begin_step(self.roster.running, asked)
            if waiting is not asked:
                self.roster.hold_back(asked, waiting)
            if waiting:
                waiting = self._make_room(plan, waiting)
            budget, preempted = self._schedule_running(plan, self.max_num_batched_tokens)
            if waiting and not preempted:
                self._schedule_waiting(plan, budget, waiting)
        if self.planners.end_steps:
            self.planners.end_step(plan)
        self.request_blocks.end_step(plan)
        if not (plan.scheduled or plan.swap_out or plan.parts or plan.tiers):
            return None
        self.roster.dropped = []
        plan.after_failure, self.has_failed = self.has_failed, False
        if self.items.in_use:
            plan.dropped_items = self.items.drain_dropped()
        if self.planners.failed:
            self._fail_parts()
        return plan

    def update_planners(self, result: StepResult) -> None:
        """Gives planners the answers of their worker halves, before `update`."""
        self.planners.update(result)
        if self.planners.failed:
            self._fail_parts()

    def _fail_parts(self) -> None:
        """Ends the requests that use a part whose planner has failed."""
        for request, error in self.planners.drain_failed(self.roster.requests.values()):
            self.outputs += self.endings.end(request, "error", error)

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Adds the tokens that a step sampled, and ends complete sequences. Steps come in the order
        of their plans."""
        outputs = []
        logprobs = result.logprobs or [[]] * len(plan.scheduled)
        rows = zip(plan.scheduled, result.token_ids, logprobs, strict=True)
        for row, tokens, row_logprobs in rows:
            seq = self.roster.sequences.get(row.seq_id)
            if seq is None:
                # The sequence ended while the step was running.
                continue
            request = seq.request
            known = result.prompt_logprobs.get(row.seq_id)
            prompt_logprobs = request.new_prompt_logprobs(row, known) if known else []
            if row.seq_id in result.errors:
                outputs += self.fail(request.request_id, result.errors[row.seq_id])
            elif row.seq_id in result.pooled:
                self.endings.finish(request, [seq], "stop")
                outputs.append(seq.output("stop", [], [], [], result.pooled[row.seq_id]))
            elif row.samples and request.search:
                outputs += self._store_candidates(
                    seq, request.search, result.candidates[row.seq_id]
                )
            elif row.samples:
                seq.sampler_state = result.sampler_state.get(row.seq_id, seq.sampler_state)
                drafts = result.drafts.get(row.seq_id, [])
                taken = self._accept_tokens(seq, tokens, drafts, row_logprobs, prompt_logprobs)
                if row.num_drafts:
                    taken.num_draft_tokens = row.num_drafts
                    taken.num_accepted_tokens = len(tokens) - 1
                    taken.drafters = result.drafters.get(row.seq_id, [])
                outputs.append(taken)
            elif prompt_logprobs:
                outputs.append(seq.output(None, [], [], prompt_logprobs))
        return outputs

    def reset_after_failure(self, plans: Collection[StepPlan]) -> None:
        """Steps failed or were interrupted, so the runner's state cannot be relied on. All requests
        are computed again. Safe after an interrupt at any point of an update."""
        self.roster.requeue_all(plans)
        self.request_blocks.reset(plans)
        self.has_failed = True
        for request in self.roster.waiting:
            request.forget_all()

    def drop_plan(self) -> StepPlan:
        """An empty plan: it only makes the runner drop dead sequences."""
        dropped, self.roster.dropped = self.roster.dropped, []
        return StepPlan(dropped=dropped, dropped_items=self.items.drain_dropped())

    # Planning

    def _make_room(self, plan: StepPlan, waiting: Collection[Request]) -> Collection[Request]:
        """Preempts a request that gives way to a waiting one. Returns the requests that may be
        admitted: that waiting one, or all of `waiting`."""
        running = self.roster.running
        found = (
            (seq, victim)
            for seq in waiting
            if running and (victim := self.policy.gives_way(seq, running)) is not None
        )
        for request, victim in islice(found, _MOST_OVERTAKEN):
            try:
                decided = self.admission.decide(request, self.max_num_batched_tokens)
            except PlannerError:
                # The next request that asks ends it.
                continue
            if not isinstance(decided, Refused) or decided.reason in ("drawing", "part"):
                continue
            victim.gave_way = True
            victim.sort_key = (*request.sort_key, 0)
            self._preempt(plan, victim)
            return [request]
        return waiting

    def _schedule_running(self, plan: StepPlan, budget: int) -> tuple[int, bool]:
        """Schedules running requests. Returns what is left of the budget, and if any preempted."""
        running = self.roster.running
        for request in running if self.blocks.trims else ():
            self.request_blocks.trim(request)
        preempted = False
        position = 0
        while position < len(running) and budget > 0:
            request = running[position]
            granted = self.policy.grant(request, budget)
            if granted <= 0 or self.request_blocks.commit_next(plan, request):
                budget, position = budget - (granted > 0), position + 1
                continue
            try:
                ranges = self.request_blocks.ranges(request, granted)
                while not self.blocks.fits(ranges):
                    if not preempted and self.admission.makes_room(request):
                        continue
                    victim = self.policy.gives_way(request, running[position:]) or request
                    self._preempt(plan, victim)
                    preempted = True
                    if victim is request:
                        break
                else:
                    budget -= self.request_blocks.commit(plan, request, ranges)
                    position += 1
            except PlannerError as error:
                self.outputs += self.endings.end(request, "error", str(error))
        return budget, preempted

    def _schedule_waiting(self, plan: StepPlan, budget: int, waiting: Collection[Request]) -> None:
        held_up: list[Request] = []
        num_behind = 0
        for request in waiting:
            if budget == 0 or num_behind == _MOST_OVERTAKEN:
                break
            if not all(self.policy.overtakes(request, other) for other in held_up):
                continue
            num_behind += bool(held_up)
            if self.tiers.tiers and self.request_blocks.begin_load(request):
                continue
            tokens = self.policy.grant(request, budget)
            try:
                decided = self.admission.decide(request, tokens)
                if isinstance(decided, Refused):
                    self.roster.hold(request, decided)
                    if decided.reason != "part":
                        held_up.append(request)
                    # Other requests may not need what this part lacks.
                    continue
                self._admit(plan, request, decided)
                ranges = self.request_blocks.ranges(request, tokens)
                budget -= self.request_blocks.commit(plan, request, ranges)
            except PlannerError as error:
                self.outputs += self.endings.end(request, "error", str(error))

    def _schedule_alone(self, plan: StepPlan, request: Request) -> None:
        """Schedules the quarantined request alone. It fits, since all others wait without blocks.
        It computes all its keys and values itself."""
        try:
            if request in self.roster.waiting:
                self._admit(plan, request, Admitted())
            self.request_blocks.trim(request)
            ranges = self.request_blocks.ranges(request, self.max_num_batched_tokens)
            self.request_blocks.commit(plan, request, ranges)
        except PlannerError as error:
            self.outputs += self.endings.end(request, "error", str(error))

    def _release_from_quarantine(self, request: Request) -> None:
        """The request has sampled a token, so it did not cause the failure. It makes room for the
        next one."""
        if self.quarantine.release(request.request_id) and request.unfinished:
            self.roster.requeue(request)
            self.request_blocks.start_over(request)

    def _admit(self, plan: StepPlan, request: Request, admitted: Admitted) -> None:
        if self.planners.begins:
            self.planners.begin(plan, request)
        self.roster.start(request)
        if self.draft_budget is not None:
            self.draft_budget.limits |= dict.fromkeys(request.seq_ids, request.max_asked)
        plan.swap_in += self.request_blocks.admit(request, admitted)
        if request.scheduled_time is None:
            request.num_cached_tokens = request.leader.num_computed_tokens
            self.events.scheduled(request)

    def _preempt(self, plan: StepPlan, request: Request) -> None:
        """Preempts a running request. It waits, and is later recomputed from its tokens or swapped
        in from the host."""
        self.roster.requeue(request, Refused("blocks"))
        copies = self.request_blocks.swap_out(request)
        if copies is None:
            self.request_blocks.start_over(request)
        else:
            plan.swap_out += copies
        self.events.add("preempted", request)

    # Results

    def _accept_tokens(
        self,
        seq: Sequence,
        drawn: list[int],
        drafts: list[int],
        logprobs: list[TokenLogprobs],
        prompt_logprobs: list[TokenLogprobs],
    ) -> EngineOutput:
        request = seq.request
        before = len(seq.token_ids)
        reason = seq.append_sampled(drawn, drafts)
        tokens = seq.token_ids[before:]
        if seq.num_placeholders or not self.blocks.shared_within_step:
            # The running step already computes tokens that are known only now.
            self.request_blocks.publish(seq, seq.num_computed_tokens)
        if request.first_token_time is None:
            self.events.first_token(request)
        if reason is not None:
            self.endings.finish(request, [seq], reason)
        if self.quarantine.quarantined:
            self._release_from_quarantine(request)
        return seq.output(reason, tokens, logprobs[: len(tokens)], prompt_logprobs)

    def _store_candidates(
        self, beam: Sequence, search: BeamSearch, candidates: Candidates
    ) -> list[EngineOutput]:
        """Stores a beam's candidates. Once all beams of the request have theirs, the search forks
        to the next beams, or ends."""
        request = beam.request
        step = BeamStep(request, search)
        if beam.num_placeholders == 0:
            # The beam was preempted in the meantime, and will be computed again.
            return []
        self.events.first_token(request)
        if not step.add(beam, candidates):
            return []
        outputs: list[EngineOutput] = []
        if forks := step.advance(self._seq_ids):
            for seq in self.request_blocks.replace_beams(request, forks):
                self.endings.release(seq)
        elif len(outputs := step.outputs()) < (n := request.params.n):
            problem = leave_too_little(request.params, f"{len(outputs)} sequences, and n is {n}")
            outputs = self.endings.end(request, "error", problem)
        else:
            self.endings.finish(request, request.unfinished, outputs[0].finish_reason or "stop")
        self._release_from_quarantine(request)
        return outputs
