"""The engine in the front's own process and thread."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from msgspec import Raw

from toolkit_lm.config import VllmConfig
from toolkit_lm.engine.client import EngineClient, EngineInfo
from toolkit_lm.engine.core import REST, EngineCore
from toolkit_lm.engine.feature_mirror import EngineFeatures
from toolkit_lm.errors import EngineDeadError, ToolkitError
from toolkit_lm.executor import make_executor
from toolkit_lm.messages import EngineOutputs, EngineRequest
from toolkit_lm.params import FinishReason
from toolkit_lm.plugin import Plugins


class InProcessClient(EngineClient):
    """Calls EngineCore. It sets neither thread counts nor CPU affinity nor signal handlers of its
    host application."""

    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        """Loads the model. `config` is resolved, `resolve_device` included."""
        super().__init__(config)
        self._features = EngineFeatures()
        self.core = EngineCore(
            config, plugins, make_executor(config, plugins), listening=plugins.has_event_listeners
        )
        self._info = EngineInfo(
            config=config,
            kv_cache=self.core.kv_cache,
            pooling=self.core.pooling,
            whole_items=self.core.whole_items,
        )
        self._wakes: SimpleQueue[None] = SimpleQueue()

    def wait_ready(self, timeout: float | None = None) -> EngineInfo:
        return self._info

    @property
    def progress_time(self) -> float:
        return self.core.progress_time

    def add(self, requests: Sequence[EngineRequest]) -> None:
        if any(request.features for request in requests):
            with self.features.sending(requests) as (requests, evicted):
                missing = self._features.fill(0, requests, evicted)
                assert not missing, "nothing comes between both sides"
        added = []
        try:
            for request in requests:
                self.core.add_request(request)
                added.append(request.request_id)
        except BaseException:
            for request_id in added:
                self.core.finish(request_id)
            raise

    def finish(
        self, request_id: str, reason: FinishReason = "abort", index: int | None = None
    ) -> None:
        self.core.finish(request_id, reason, index)

    def reset_prefix_cache(self) -> None:
        self.core.reset_prefix_cache()

    def call_workers(self, method: str, payload: Raw) -> Future[list[Raw]]:
        future: Future[list[Raw]] = Future()
        try:
            future.set_result(self.core.call_workers(method, payload))
        except EngineDeadError:
            raise
        except ToolkitError as error:
            future.set_exception(error)
        return future

    def step(self, timeout: float | None = None) -> EngineOutputs:
        outputs = self.core.step() if self.core.has_unfinished else self.core.poll_outputs()
        if not (outputs.outputs or outputs.events):
            if not self.core.has_unfinished:
                self._rest(timeout)
            elif self.core.num_idle > 1:
                self._rest(REST if timeout is None else min(timeout, REST))
        return outputs

    def _rest(self, timeout: float | None) -> None:
        try:
            self._wakes.get(timeout=timeout)
            while True:
                self._wakes.get_nowait()
        except Empty:
            return

    def poll_outputs(self) -> EngineOutputs:
        return self.core.poll_outputs()

    def wake(self) -> None:
        self._wakes.put(None)

    def dump_stacks(self) -> None:
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback(sys.__stderr__)
        self.core.executor.dump_stacks()

    def shutdown(self) -> None:
        self.core.shutdown()
        self._features.leave(0)
