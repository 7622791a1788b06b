"""LLMEngine: the loop in public. Prompts in, texts out, one step at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Unpack
from weakref import WeakKeyDictionary

from toolkit_lm.config import VllmConfig
from toolkit_lm.config.tasks import Task
from toolkit_lm.engine.client import EngineClient
from toolkit_lm.engine.process.launch import EngineProcess
from toolkit_lm.engine.start import start_engine
from toolkit_lm.engine.start_up import no_garbage_collection
from toolkit_lm.errors import EngineDeadError, RequestError, ToolkitError
from toolkit_lm.frontend.calls import Answer, call_workers
from toolkit_lm.frontend.queue import QueueLimits
from toolkit_lm.messages import EngineOutput, EngineOutputs
from toolkit_lm.outputs import AnyRequestOutput
from toolkit_lm.params import FinishReason, SamplingParams
from toolkit_lm.plugin import Plugins
from toolkit_lm.processing.limits import RequestLimits
from toolkit_lm.processing.pooling_state import AnyState, PoolingState
from toolkit_lm.processing.processor import Processor
from toolkit_lm.processing.request_state import RequestState
from toolkit_lm.processing.requests import PreparedRequest, RequestOptions
from toolkit_lm.prompts import Prompt
from toolkit_lm.renderer import make_renderer
from toolkit_lm.resolution.no_effect import without_effect
from toolkit_lm.resolution.resolution import resolve_configured

logger = logging.getLogger(__name__)

_GRACE = 1.0
"""Seconds that a silent engine gets to end a request after its deadline. Then the request ends
here."""


class LLMEngine:
    """Processor, engine and output texts in the caller's own thread.

        engine = LLMEngine(VllmConfig.make(model="tiny"))
        engine.add_request("1", "Once upon a time", SamplingParams(max_tokens=32))
        while engine.has_unfinished_requests():
            for output in engine.step():
                ...

    The engine runs in this process, or, with the option `engine_process`, in one of its own. The
    methods of `processor` may be called from any thread, all others from one at a time.
    """

    @no_garbage_collection()
    def __init__(
        self,
        config: VllmConfig,
        *,
        plugins: Plugins | Sequence[object] = (),
        wait: bool = True,
        process: EngineProcess | None = None,
    ) -> None:
        """Loads the plugins (or takes loaded ones), resolves the config and loads the model. Raises
        ToolkitError.

        `wait=False` returns before an engine process is ready: call `wait_ready` before the first
        request. `process`: a process started earlier, for a config that needs one. The engine now
        owns it.
        """
        # Importing torch takes most of a start: it begins at once.
        if (
            config.engine.engine_process
            and process is None
            and config.parallel.data_parallel_size == 1
        ):
            process = EngineProcess()
        try:
            self.plugins = (
                plugins if isinstance(plugins, Plugins) else Plugins.load(config.plugins, plugins)
            )
            self._asked = self.config = resolve_configured(
                self.plugins.configure(config), self.plugins
            )
            for option in without_effect(config, self.config, self.plugins):
                logger.warning("%s", option)
            self.client = self._started(process)
        except BaseException:
            if process is not None:
                process.end()
            raise
        self._closed = False
        try:
            self.renderer = make_renderer(self.config, self.plugins)
            with self.plugins.boundary:
                self.processor = Processor(self.config, self.renderer, self.plugins)
            self._share_features()
            self.queue: QueueLimits | None = None
            """Told of what waits, where somebody bounds it."""
            self._states: dict[str, AnyState] = {}
            self.on_lost: Callable[[AnyState, PreparedRequest], object] | None = None
            """Has a request rendered again whose data the engine lacks, and then calls
            `send_again`. None: it is done here, at once."""
            self._rendered: WeakKeyDictionary[AnyState, PreparedRequest] = WeakKeyDictionary()
            """What the engine may want once more, with the data of its media."""
            self._ready = False
            self._busy_since = 0.0
            """time.monotonic() at which the engine got work after it had none."""
            if wait:
                self.wait_ready()
        except BaseException:
            self.close()
            raise

    def _started(self, process: EngineProcess | None = None) -> EngineClient:
        """Starts a new engine, with its listeners."""
        self.plugins.watch(self._asked)
        try:
            return start_engine(self._asked, self.plugins, process)
        except BaseException:
            self.plugins.close()
            raise

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Waits until the engine has loaded and warmed up. Raises the error that kept it from
        starting.

        Returns False if `timeout` seconds, or a `wake` of the client, came first.
        """
        info = self.client.wait_ready(timeout)
        if info is None:
            return False
        self.config = info.config
        self.processor.set_limits(
            RequestLimits(info.config, info.kv_cache, info.pooling, whole_items=info.whole_items)
        )
        self._busy_since = time.monotonic()
        self._ready = True
        return True

    def restart(self) -> None:
        """Ends the engine, forgets all requests, and starts another engine, which may still be
        loading."""
        self.client.shutdown()
        self.plugins.close()
        self._states.clear()
        self._ready = False
        self.client = self._started()
        self._share_features()

    def _share_features(self) -> None:
        """Gives the renderer of a multimodal model the lookup of items that the engine holds."""
        if self.renderer.rules is not None:
            self.renderer.feature_cache = self.client.features

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Tasks that the model serves; empty until the engine has been ready."""
        return self.processor.tasks

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Renders, checks and queues a prompt. Raises RequestError; the other requests continue."""
        self.submit(self.processor.prepare(request_id, prompt, params, options))

    def submit(self, prepared: PreparedRequest) -> AnyState:
        """Queues a prepared request. Raises RequestError if its id is in use, and EngineDeadError
        after `close`."""
        [state] = self.submit_batch([prepared])
        return state

    def submit_batch(self, prepared: Sequence[PreparedRequest]) -> list[AnyState]:
        """Queues prepared requests: all of them, or none if it raises, as `submit` does."""
        self._check_open()
        states: dict[str, AnyState] = {}
        for entry in prepared:
            message = entry.message
            if message.request_id in self._states or message.request_id in states:
                raise RequestError(f"request id {message.request_id!r} is in use.", "request_id")
            pooled = not message.draws_tokens
            states[message.request_id] = (
                PoolingState(message, entry.prompt)
                if pooled
                else RequestState(entry, self.renderer)
            )
            if entry.rendering is not None:
                self._rendered[states[message.request_id]] = entry
                self._settle(entry)
        messages = [entry.message for entry in prepared]
        self.client.add(messages)
        if not self._states:
            self._busy_since = time.monotonic()
        self._states.update(states)
        if self.queue is not None:
            self.queue.add(messages)
        return list(states.values())

    def _settle(self, prepared: PreparedRequest, *, again: bool = False) -> None:
        """Ensures that a request has all data that the engine lacks. It must be sent next: until
        then the engine forgets nothing."""
        message = prepared.message
        if again or (message.features and self.client.features.lacks(message)):
            self.processor.render_again(prepared)
        if prepared.rendering is not None:
            prepared.rendering.release()

    def abort(self, request_ids: str | Iterable[str]) -> list[AnyRequestOutput]:
        """Ends requests; their blocks are free at once. Returns their last outputs. Unknown ids are
        accepted."""
        return [
            output for state in self.end(request_ids) if (output := state.next_output()) is not None
        ]

    def end(
        self, request_ids: str | Iterable[str], reason: FinishReason = "abort"
    ) -> list[AnyState]:
        """Ends requests, as `abort` does, without making outputs."""
        ended = []
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if state := self._states.pop(request_id, None):
                self.client.finish(request_id, reason)
                self._leave_queue(request_id)
                with state.lock:
                    state.end(reason)
                ended.append(state)
        return ended

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes. Running requests continue."""
        self._check_open()
        self.client.reset_prefix_cache()

    def call_workers(
        self, method: str, payload: object = None, answer: type[Answer] | None = None
    ) -> Future[list[Answer]]:
        """Calls a method of the workers, as `LLM.call_workers` does. The future is done at a later
        `step`, when the workers have answered.

        Raises RequestError for a payload that cannot be sent, EngineDeadError.
        """
        self._check_open()
        return call_workers(self.client, method, payload, answer)

    # The loop

    def has_unfinished_requests(self) -> bool:
        return bool(self._states)

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since the engine's last sign of life, while there was work. May be called from
        any thread."""
        if not (self._ready and self._states):
            return 0.0
        return time.monotonic() - max(self.client.progress_time, self._busy_since)

    def step(self) -> list[AnyRequestOutput]:
        """Computes one step. Returns the outputs for the caller, by each request's
        `output_kind`."""
        return [output for state in self.advance() if (output := state.next_output()) is not None]

    def advance(self, timeout: float | None = None) -> list[AnyState]:
        """Computes one step, as `step` does, without making outputs: for callers that need only
        some of them, before the next call.

        `timeout`: most seconds to wait for an engine process.
        """
        self._check_open()
        if timeout is None:
            timeout = _GRACE if self._states else 0
        states = self._apply_outputs(self.client.step(timeout))
        return states if self.seconds_since_progress < _GRACE else states + self._end_late()

    def _end_late(self) -> list[AnyState]:
        """Ends requests past their deadline in place of an engine that hangs, or whose step is
        slow."""
        latest = time.monotonic() - _GRACE
        late = [
            state.request_id
            for state in self._states.values()
            if state.request.deadline is not None and state.request.deadline < latest
        ]
        return self.end(late, "timeout")

    def _apply_outputs(self, outputs: EngineOutputs) -> list[AnyState]:
        if self.queue is not None:
            self.queue.admit(outputs.admitted)
        touched: dict[str, AnyState] = {}
        has_finished_some = False
        for output in outputs.outputs:
            if state := self._states.get(output.request_id):
                touched[output.request_id] = state
                has_finished_some |= self._apply(state, output)
        ended = self._send_again(outputs.missing) if outputs.missing else []
        for request_id, state in touched.items():
            if state.finished:
                del self._states[request_id]
                self._leave_queue(request_id)
        for event in outputs.events:
            self.plugins.event(event)
        # Commands that must not wait for a next step: there may be none.
        more = self._apply_outputs(self.client.poll_outputs()) if has_finished_some else []
        return [*touched.values(), *ended, *more]

    def _apply(self, state: AnyState, output: EngineOutput) -> bool:
        """Applies an output. True: the engine was informed that a sequence has ended."""
        try:
            with state.lock:
                ends = state.apply(output)
            if ends:
                self.client.finish(output.request_id, "stop", output.index)
            return ends
        except Exception as error:
            # A renderer is a plugin: its error on one request ends that request alone.
            renderer = self.config.renderer.renderer
            with state.lock:
                state.end(
                    "error",
                    self.plugins.renderers.get(renderer).owner.failure(
                        error, f"renderer {renderer!r}"
                    ),
                )
            self.client.finish(output.request_id, "error")
            return True

    def _send_again(self, request_ids: Iterable[str]) -> list[AnyState]:
        """Sends requests with the data that the engine lacks, once. Returns those that end here."""
        ended: list[AnyState] = []
        for state in [
            self._states[request_id] for request_id in request_ids if request_id in self._states
        ]:
            prepared = self._rendered.pop(state, None)
            if prepared is None:
                ended += self._fail(
                    state, "the engine has lost the data of its images or other media, twice."
                )
            elif self.on_lost is not None:
                self.on_lost(state, prepared)
            else:
                ended += self.send_again(state, prepared, again=True)
        return ended

    def send_again(
        self,
        state: AnyState,
        prepared: PreparedRequest,
        failure: BaseException | None = None,
        *,
        again: bool = False,
    ) -> list[AnyState]:
        """Sends a request again, unless it has ended. Returns it if it ends here.

        `failure`: the error for which it could not be rendered. `again`: it is still to be rendered
        again, which is done here.
        """
        if self._states.get(state.request_id) is not state:
            return []
        try:
            if failure is not None:
                raise failure
            self._settle(prepared, again=again)
            self.client.add([prepared.message])
            return []
        except EngineDeadError:
            raise
        except Exception as error:
            return self._fail(state, str(error))

    def _fail(self, state: AnyState, error: str) -> list[AnyState]:
        with state.lock:
            state.end("error", error)
        return self.end(state.request_id)

    def _leave_queue(self, request_id: str) -> None:
        if self.queue is not None:
            self.queue.discard(request_id)

    def close(self) -> None:
        """Ends the engine and releases its memory. The object cannot be used after that. Safe to
        call twice."""
        closed, self._closed = self._closed, True
        try:
            if not closed:
                with suppress(ToolkitError):
                    for event in self.client.poll_outputs().events:
                        self.plugins.event(event)
            self.client.shutdown()
        finally:
            self.plugins.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine has been shut down.")

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
