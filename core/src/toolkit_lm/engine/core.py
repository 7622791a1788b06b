"""EngineCore: the loop. Tokens in, tokens out."""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

import msgspec

from toolkit_lm.config import PoolingTask, VllmConfig
from toolkit_lm.engine.memory import size_kv_cache
from toolkit_lm.errors import EngineDeadError, RequestError, ToolkitError, UnsupportedError
from toolkit_lm.events import Event, LoadEvent, StepEvent
from toolkit_lm.executor import Executor
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

logger = logging.getLogger(__name__)

_MOST_FAILURES = 3
"""Failed steps in a row, with no result and no culprit in between, before the engine gives up."""


REST = 0.005
"""Seconds between steps that find nothing to compute, though there are requests, or a part awaits
something."""


class InFlightStep(NamedTuple):
    """A step on its way."""

    plan: StepPlan
    start: float
    future: Future[StepResult]


class EngineCore:
    """Scheduler and executor, and nothing of texts. Used from one thread at a time."""

    def __init__(
        self,
        config: VllmConfig,
        plugins: Plugins,
        executor: Executor,
        *,
        listening: bool = True,
        on_phase: Callable[[str], object] = lambda name: None,
    ) -> None:
        """Loads the model and warms it up. `listening`: somebody wants the events. `on_phase` is
        told what begins."""
        self.config = config
        self.executor = executor
        self.listening = listening
        self.progress_time = time.monotonic()
        """When the last step ended."""
        self.num_idle = 0
        """Calls of `step` in a row that have found nothing to compute: whoever calls it again and
        again rests a little."""
        self._in_flight: deque[InFlightStep] = deque()
        """In the order of their execution."""
        self._outputs: list[EngineOutput] = []
        self._admitted: list[str] = []
        self._events: list[Event] = []
        self._failures = 0
        self._logged: set[tuple[str, ...]] = set()
        """Where the steps since the last failure of a whole batch have failed."""
        self._failure_of = plugins.failure
        self._policy_owner = plugins.scheduling_policies.get(config.scheduler.policy).owner
        policy = load_policy(plugins.scheduling_policies, config.scheduler)
        with plugins.boundary:
            on_phase("loading the model")
            executor.load()
            specs = executor.kv_cache_specs()
            self.kv_cache = self._plan_kv_cache(specs)
            executor.init_kv_cache([self.kv_cache.of_layers(one) for one in specs])
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
            planners=Planners.make(config, plugins, facts),
            tiers=self._make_tiers(plugins),
        )

    def _make_tiers(self, plugins: Plugins) -> dict[str, KVTier]:
        """Those in which contents are found, by name. Raises UnsupportedError."""
        tiers: dict[str, KVTier] = {
            entry.key: plugins.kv_tiers.make_tier(
                entry.key, self.config, self.kv_cache, options=plugins.options(entry.plugin)
            )
            for entry in plugins.kv_tiers.entries()
            if entry.scheduler is not None
        }
        if tiers and self.config.parallel.num_ranks > 1:
            raise UnsupportedError(
                f"KV tier {next(iter(tiers))!r} is for engines of one worker, and this one has "
                f"{self.config.parallel.num_ranks}: lower them, or leave its plugin out."
            )
        return tiers

    def _plan_kv_cache(self, ranks: Sequence[Mapping[str, KVCacheSpec]]) -> KVCacheConfig:
        """Groups, pools and their blocks. Raises CapacityError."""
        specs = {layer: spec for one in ranks for layer, spec in one.items()}
        planned = plan_groups(specs, self.executor.backends())
        # A rank has pages for its own layers only: that of the most layers counts.
        of_ranks = zip(*(planned.of_layers(one).pools for one in ranks), strict=True)
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
        """Forgets what is cached of tokens. Requests under way go on."""
        for pool in self.scheduler.blocks.pools:
            pool.forget_all()
        self.scheduler.tiers.forget_all()

    @property
    def has_unfinished(self) -> bool:
        """There are requests, or a part awaits something: call `step`."""
        planners = self.scheduler.planners
        return bool(self.scheduler.roster.requests or (planners.awaiting and planners.awaits()))

    def step(self) -> EngineOutputs:
        """Takes in the next step's results; meanwhile the one after it is computed, where that is
        faster. Call it while `has_unfinished`.

        A step that fails is computed again request by request: the one that fails again, alone,
        ends with an error, the others go on. Raises EngineDeadError when nothing can be computed
        any more.
        """
        idle = False
        try:
            self._launch()
            idle = not self._in_flight
            self.num_idle = self.num_idle + 1 if idle else 0
            if idle and self.scheduler.planners.awaits():
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
            # An interrupt, say: the next step begins anew.
            self._reset_after_failure()
            raise
        outputs = self.poll_outputs()
        if not idle or outputs.outputs:
            self.progress_time = outputs.time
        return outputs

    def poll_outputs(self) -> EngineOutputs:
        """What came since the last call."""
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
        self.executor.shutdown()

    def _launch(self) -> None:
        """Plans and starts steps, as many as may be on their way."""
        while len(self._in_flight) < (
            1 if self.scheduler.quarantine.quarantined else self.executor.max_in_flight
        ):
            start = time.monotonic()
            plan = self.scheduler.schedule()
            if plan is None:
                return
            self._in_flight.append(InFlightStep(plan, start, self.executor.execute(plan)))

    def _collect(self) -> None:
        """Takes in the oldest step's results. It stays in flight when it failed."""
        step = self._in_flight[0]
        result = step.future.result()
        self._in_flight.popleft()
        if result.parts:
            self.scheduler.take_parts(result)
        if step.plan.tiers is not None:
            self.scheduler.request_blocks.take_loads(step.plan, result)
        if not self.scheduler.roster.requests_in(step.plan):
            # All that it computed has ended meanwhile, perhaps long ago.
            return
        outputs = self.scheduler.update(step.plan, result)
        self._outputs += outputs
        now = time.monotonic()
        # It began when the one before had ended.
        duration = now - max(step.start, self.progress_time)
        num_tokens = step.plan.num_tokens
        self.scheduler.preemption.observe(num_tokens, duration)
        if self.listening:
            got = [len(output.token_ids) for output in outputs if output.token_ids]
            event = StepEvent(
                time=now,
                duration=duration,
                num_tokens=num_tokens,
                num_output_tokens=sum(got),
                num_output_sequences=len(got),
                num_compilations=result.num_compilations,
            )
            self._events.append(event)
        self.scheduler.policy.observe(step.plan, duration)
        self._failures = 0

    def _recover(self, error: Exception) -> None:
        """After a failed step: finds the request that it is to blame for, or lets the engine
        die."""
        what = self._failure_of(error)
        alone = bool(self.scheduler.quarantine.quarantined)
        self._log_failure(what, error, alone)
        requests = (
            self.scheduler.roster.requests_in(self._in_flight[0].plan) if self._in_flight else []
        )
        self._reset_after_failure()
        if alone and requests:
            (culprit,) = requests
            self._outputs += self.scheduler.fail(culprit, what)
            try:
                self.executor.execute(self.scheduler.drop_plan()).result()
                self.executor.warm_up()
            except Exception:
                raise EngineDeadError(
                    f"the engine cannot compute anything any more: {what}"
                ) from error
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
            raise EngineDeadError(f"{self._failures} steps in a row have failed: {what}") from error
        self.scheduler.quarantine.isolate(requests)

    def _log_failure(self, what: str, error: Exception, alone: bool) -> None:
        """With its traceback, unless the step whose requests are computed alone has failed in the
        same place before."""
        frames = traceback.extract_tb(error.__traceback__)[-1:]
        place = (type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in frames))
        if not alone:
            self._logged.clear()
        logger.error("a step failed: %s", what, exc_info=None if place in self._logged else error)
        self._logged.add(place)

    def _reset_after_failure(self) -> None:
        """Nothing that the runner holds can be relied on: all requests are computed again from
        their tokens."""
        steps, self._in_flight = self._in_flight, deque()
        self.scheduler.reset_after_failure([step.plan for step in steps])
        # What runs already cannot be stopped; its result counts no more.
        wait([step.future for step in steps])

    def _drain_scheduler(self) -> None:
        """Takes over what the scheduler has to tell."""
        events = self.scheduler.events.take()
        outputs, self.scheduler.outputs = self.scheduler.outputs, []
        self._outputs += outputs
        for event in events:
            if event.kind == "scheduled":
                self._admitted.append(event.request_id)
        if not self.listening:
            return
        self._events += events
        # Without an event before it, the load is what it was.
        if self._events and not isinstance(self._events[-1], LoadEvent):
            self._events.append(load_event(self.scheduler.roster, self.scheduler.blocks))
