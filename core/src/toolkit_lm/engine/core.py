"""EngineCore: the loop of the engine. Tokens in, tokens out."""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import NamedTuple

import msgspec

from toolkit_lm.config import PoolingTask, VllmConfig
from toolkit_lm.engine.memory import size_kv_cache
from toolkit_lm.errors import EngineDeadError, RequestError, ToolkitError, UnsupportedError
from toolkit_lm.events import Event, LoadEvent, StepEvent
from toolkit_lm.executor import Executor
from toolkit_lm.executor.calls import values_of
from toolkit_lm.kv import KVCacheConfig, KVCacheSpec, KVTier, plan_groups
from toolkit_lm.messages import (
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    PoolingRules,
    StepPlan,
    StepResult,
)
from toolkit_lm.params import FinishReason
from toolkit_lm.plugin import Plugins
from toolkit_lm.scheduler import Planners, Scheduler, load_event, load_policy
from toolkit_lm.scheduler.draft_budget import DraftingFacts
from toolkit_lm.step.calls import call_method, worker_methods

logger = logging.getLogger(__name__)

_MOST_FAILURES = 3
"""Most failed steps in a row, without a result or a culprit in between, before the engine gives
up."""


_LAST_STORES = 10.0
"""Most seconds that the end of the engine waits for the last blocks to be stored."""

REST = 0.005
"""Seconds between steps that find nothing to compute, although there are requests, or a part awaits
something."""


class InFlightStep(NamedTuple):
    """A step that is running."""

    plan: StepPlan
    start: float
    future: Future[StepResult]


class EngineCore:
    """Scheduler and executor, without any text. Used from one thread at a time."""

    weight_version = ""
    """Version of the weights; empty: those of the checkpoint."""

    def __init__(
        self,
        config: VllmConfig,
        plugins: Plugins,
        executor: Executor,
        *,
        listening: bool = True,
        on_phase: Callable[[str], object] = lambda name: None,
    ) -> None:
        """Loads the model and warms it up. `listening`: events are wanted. `on_phase` is called
        with the name of each phase that begins."""
        self.config = config
        self.executor = executor
        self.listening = listening
        self.progress_time = time.monotonic()
        """time.monotonic() at the end of the last step."""
        self.num_idle = 0
        """Number of calls of `step` in a row that found nothing to compute. A caller in a loop
        rests a little then."""
        self._in_flight: deque[InFlightStep] = deque()
        """Running steps, in the order of their execution."""
        self._outputs: list[EngineOutput] = []
        self._admitted: list[str] = []
        self._events: list[Event] = []
        self._failures = 0
        self._logged: set[tuple[str, ...]] = set()
        """Places where steps have failed since the last failure of a whole batch."""
        self._failure_of = plugins.failure
        self._policy_owner = plugins.scheduling_policies.get(config.scheduler.policy).owner
        policy = load_policy(plugins.scheduling_policies, config.scheduler)
        with plugins.boundary:
            on_phase("loading the model")
            executor.load()
            specs = executor.kv_cache_specs()
            self.kv_cache = self._plan_kv_cache(specs)
            executor.init_kv_cache([self.kv_cache.of_layers(rank_specs) for rank_specs in specs])
            on_phase("warming up")
            executor.warm_up()
            facts = executor.part_facts()
            self.pooling: dict[PoolingTask, PoolingRules] = (
                msgspec.msgpack.decode(facts["pooling"], type=dict[PoolingTask, PoolingRules])
                if "pooling" in facts
                else {}
            )
        self.whole_items = config.checkpoint is not None and plugins.models.computes_items_whole(
            config.checkpoint.architecture
        )
        self.scheduler = Scheduler(
            config,
            self.kv_cache,
            policy,
            plugins.fingerprint().digest,
            whole_items=self.whole_items,
            planners=Planners.make(config, plugins, facts, self),
            tiers=self._make_tiers(plugins),
            drafting=msgspec.msgpack.decode(facts["drafter"], type=DraftingFacts)
            if "drafter" in facts
            else None,
        )

    def _make_tiers(self, plugins: Plugins) -> dict[str, KVTier]:
        """Makes the tiers that are searched by content, by name."""
        tiers = {
            entry.key: plugins.kv_tiers.make_tier(
                entry.key, self.config, self.kv_cache, options=plugins.options(entry.plugin)
            )
            for entry in plugins.kv_tiers.entries()
            if entry.scheduler is not None
        }
        return {name: tier for name, tier in tiers.items() if not tier.is_off}

    def _plan_kv_cache(self, ranks: Sequence[Mapping[str, KVCacheSpec]]) -> KVCacheConfig:
        """Plans groups, pools and their blocks. Raises CapacityError, UnsupportedError."""
        specs = {layer: spec for rank_specs in ranks for layer, spec in rank_specs.items()}
        planned = plan_groups(specs, self.executor.backends())
        if self.config.cache.enable_prefix_caching and (group := planned.without_prefixes):
            raise UnsupportedError(
                f"prefix caching: layer {group.layers[0]!r} keeps {group.spec.kind!r}, whose "
                "blocks no other sequence can use, and no snapshots of them. Able: "
                "enable_prefix_caching=False."
            )
        # A rank has pages for its own layers only: the rank with the most layers counts.
        of_ranks = zip(*(planned.of_layers(rank_specs).pools for rank_specs in ranks), strict=True)
        widest = KVCacheConfig(
            planned.groups, [max(pools, key=lambda pool: pool.num_pages) for pools in of_ranks]
        )
        return size_kv_cache(
            widest, self.config, self.executor.free_memory(), self.executor.free_host_memory()
        )

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request. Raises RequestError."""
        try:
            self.scheduler.add(request)
        except ToolkitError:
            raise
        except Exception as error:
            raise RequestError(
                self._policy_owner.failure(
                    error, f"scheduling policy {self.config.scheduler.policy!r}"
                )
            ) from error
        self._drain_scheduler()

    def finish(
        self, request_id: str, reason: FinishReason = "abort", index: int | None = None
    ) -> None:
        """Ends a request, or one of its sequences, from outside. Its blocks are free at once. No
        output follows."""
        self.scheduler.finish(request_id, reason, index)
        self._drain_scheduler()

    def reset_prefix_cache(self) -> None:
        """Forgets cached prefixes. Running requests continue."""
        for pool in self.scheduler.blocks.pools:
            pool.forget_all()
        self.scheduler.tiers.forget_all()

    def start_over(self, salt: str | None = None) -> None:
        """Forgets the KV cache, once the running steps have ended. All requests wait, and are
        computed again from their tokens. `salt`: another salt of prefixes, also in all tiers."""
        while self._in_flight:
            self._collect()
        self._reset_after_failure()
        if salt is not None:
            self.reset_prefix_cache()
            self.scheduler.rules = self.scheduler.rules._replace(salt=salt)
            for request in self.scheduler.roster.requests.values():
                request.salt = salt
                if request.encoder is not None:
                    request.salt = request.encoder.renew(salt, request.cache_keys)

    def call_workers(self, method: str, payload: msgspec.Raw) -> list[msgspec.Raw]:
        """Calls a method of every worker between two steps, or of a planner. Returns the answers of
        the ranks that have it, or the planner's.

        Raises RequestError if none has the method, and ToolkitError for its exception. Requests
        continue.
        """
        planners = self.scheduler.planners.by_name
        if (name := method.partition(".")[0]) in planners and method in (
            found := worker_methods({name: planners[name]})
        ):
            try:
                return [call_method(method, found[method], payload)]
            except ToolkitError:
                raise
            except Exception as error:
                raise ToolkitError(f"{method}: {self._failure_of(error)}") from error
        # The failure of a running step is not an answer.
        wait([step.future for step in self._in_flight])
        return values_of(method, self.executor.call(method, payload).result())

    @property
    def has_unfinished(self) -> bool:
        """Whether there are requests, or a part awaits something: call `step`."""
        planners = self.scheduler.planners
        return bool(self.scheduler.roster.requests or (planners.awaiting and planners.awaits()))

    def step(self) -> EngineOutputs:
        """Returns the next step's outputs. If it is faster, the step after it is computed in the
        meantime. Call it while `has_unfinished`.

        A failed step is computed again request by request. The request that fails again, alone,
        ends with an error, and the others continue. Raises EngineDeadError if nothing can be
        computed any more.
        """
        idle = False
        try:
            self._launch()
            idle = not self._in_flight
            self.num_idle = self.num_idle + 1 if idle else 0
            if idle and not self.scheduler.paused and self.scheduler.planners.awaits():
                plan = self.scheduler.drop_plan()
                future = self.executor.execute(plan)
                self._in_flight.append(InFlightStep(plan, time.monotonic(), future))
                idle = False
            if not idle:
                self._collect()
        except EngineDeadError:
            # A worker has died: no other request would fare better.
            raise
        except Exception as error:
            self._recover(error)
        except BaseException:
            # An interrupt, for instance: the next step starts from a clean state.
            self._reset_after_failure()
            raise
        outputs = self.poll_outputs()
        # A pause is no stall.
        if not idle or outputs.outputs or self.scheduler.paused:
            self.progress_time = outputs.time
        return outputs

    def poll_outputs(self) -> EngineOutputs:
        """Returns the outputs since the last call."""
        self._drain_scheduler()
        outputs = EngineOutputs(
            time=time.monotonic(),
            outputs=self._outputs,
            admitted=self._admitted,
            events=self._events,
        )
        self._outputs = []
        self._admitted = []
        self._events = []
        return outputs

    def shutdown(self) -> None:
        tiers = self.scheduler.tiers
        if (work := tiers.end_step(None, idle=False)) is not None:
            # Without workers that could run it, the blocks are lost.
            with suppress(Exception):
                self.executor.execute(StepPlan(tiers=work)).result(_LAST_STORES)
        for tier in tiers.tiers.values():
            tier.close()
        self.executor.shutdown()
        self.scheduler.planners.close()

    def _launch(self) -> None:
        """Plans and starts steps, as many as may run at a time."""
        budget = self.scheduler.draft_budget
        while len(self._in_flight) < (
            1
            if self.scheduler.quarantine.quarantined or (budget is not None and budget.holds)
            else self.executor.max_in_flight
        ):
            start = time.monotonic()
            plan = self.scheduler.schedule()
            if plan is None:
                return
            self._in_flight.append(InFlightStep(plan, start, self.executor.execute(plan)))

    def _collect(self) -> None:
        """Processes the oldest step's results. A failed step stays in flight."""
        step = self._in_flight[0]
        result = step.future.result()
        self._in_flight.popleft()
        if result.parts:
            self.scheduler.update_planners(result)
        if self.scheduler.tiers.tiers:
            self.scheduler.request_blocks.finish_loads(step.plan, result)
        if not self.scheduler.roster.requests_in(step.plan):
            # All that it computed has ended in the meantime, perhaps long ago.
            return
        outputs = self.scheduler.update(step.plan, result)
        for output in outputs:
            output.weight_version = self.weight_version
        self._outputs += outputs
        now = time.monotonic()
        # It began when the one before had ended.
        duration = now - max(step.start, self.progress_time)
        self.scheduler.preemption.observe(step.plan.num_tokens, duration)
        if (budget := self.scheduler.draft_budget) is not None:
            # All that lies between two steps counts: drafts leave nothing to be done beside them.
            budget.observe(step.plan, result, now - self.progress_time)
        self.scheduler.policy.observe(step.plan, duration)
        if self.listening:
            got = [len(output.token_ids) for output in outputs if output.token_ids]
            event = StepEvent(
                time=now,
                duration=duration,
                num_tokens=step.plan.num_tokens,
                num_output_tokens=sum(got),
                num_output_sequences=len(got),
                drafts=[
                    (output.num_draft_tokens, output.num_accepted_tokens)
                    for output in outputs
                    if output.num_draft_tokens
                ],
                drafters=[found for output in outputs for found in output.drafters],
                num_compilations=result.num_compilations,
            )
            self._events.append(event)
        self._failures = 0

    def _recover(self, error: Exception) -> None:
        """Handles a failed step: finds the request that caused it, or lets the engine die."""
        failure = self._failure_of(error)
        alone = bool(self.scheduler.quarantine.quarantined)
        self._log_failure(failure, error, alone)
        requests = (
            self.scheduler.roster.requests_in(self._in_flight[0].plan) if self._in_flight else []
        )
        self._reset_after_failure()
        if alone and requests:
            (culprit,) = requests
            self._outputs += self.scheduler.fail(culprit, failure)
            try:
                self.executor.execute(self.scheduler.drop_plan()).result()
                self.executor.warm_up()
            except Exception:
                raise EngineDeadError(
                    f"the engine cannot compute anything any more: {failure}"
                ) from error
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
            raise EngineDeadError(
                f"{self._failures} steps in a row have failed: {failure}"
            ) from error
        self.scheduler.quarantine.isolate(requests)

    def _log_failure(self, failure: str, error: Exception, alone: bool) -> None:
        """Logs an error with its traceback. Leaves the traceback out if the failed step computes
        its requests alone and failed in the same place before."""
        frames = traceback.extract_tb(error.__traceback__)[-1:]
        place = (type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in frames))
        if not alone:
            self._logged.clear()
        logger.error(
            "a step failed: %s", failure, exc_info=None if place in self._logged else error
        )
        self._logged.add(place)

    def _reset_after_failure(self) -> None:
        """Resets all requests, since the runner's state cannot be relied on. They are computed
        again from their tokens."""
        steps, self._in_flight = self._in_flight, deque()
        self.scheduler.reset_after_failure([step.plan for step in steps])
        # Running steps cannot be stopped; their results are ignored.
        wait([step.future for step in steps])

    def _drain_scheduler(self) -> None:
        """Takes over the scheduler's outputs and events."""
        events = self.scheduler.events.drain()
        outputs, self.scheduler.outputs = self.scheduler.outputs, []
        self._outputs += outputs
        for event in events:
            if event.kind == "scheduled":
                self._admitted.append(event.request_id)
        if not self.listening:
            return
        self._events += events
        # Without an event before it, the load has not changed.
        if self._events and not isinstance(self._events[-1], LoadEvent):
            self._events.append(load_event(self.scheduler.roster, self.scheduler.blocks))
