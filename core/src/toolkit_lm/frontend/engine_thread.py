"""The thread that drives an engine on behalf of many event loops, and what carries news from it to
them."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from toolkit_lm.errors import EngineDeadError, RequestError, ToolkitError
from toolkit_lm.frontend.health import Health, Watchdog
from toolkit_lm.frontend.llm_engine import LLMEngine
from toolkit_lm.frontend.queue import QueueLimits
from toolkit_lm.outputs import PoolingRequestOutput, RequestOutput
from toolkit_lm.processing.pooling_state import AnyState
from toolkit_lm.processing.requests import PreparedRequest

logger = logging.getLogger(__name__)

_LOOK = 1.0
"""Most seconds that a step waits, so that a missed wake-up does no harm."""
_AT_EXIT = 2.0
"""Seconds that the interpreter's exit waits for the thread, which may be in the middle of a
step."""


class EngineThread:
    """Drives an engine: takes commands from any thread, informs callers of new outputs, and
    restarts a dead engine process."""

    def __init__(self, engine: LLMEngine) -> None:
        """Starts the thread. `engine` may still be loading."""
        self.engine = engine
        self.queue = engine.queue = QueueLimits(engine.config.limits)
        engine.on_lost = self._on_lost
        self.ready: Future[None] = Future()
        """Future that is done when the engine is ready, or has failed to start. A restart sets a
        new one."""
        self.error: BaseException | None = None
        """The error with which the engine died; None while it lives or restarts."""
        self.num_restarts = 0
        """Number of restarts of a dead engine process."""
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._listeners: dict[str, Listener] = {}
        """Listeners by request id. Only the engine's thread uses them."""
        self._lock = threading.Lock()
        """Guards `ended`, so that no command is queued after the thread's end."""
        self.ended = False
        self._stopping = False
        bound = engine.config.engine.step_timeout
        self._watchdog = Watchdog(
            lambda: engine.seconds_since_progress, bound, lambda: engine.client.dump_stacks()
        )
        self._thread = threading.Thread(target=self._run, name="toolkit_lm-engine", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    # From any thread

    def register(self, request_ids: Sequence[str], listener: Listener) -> bool:
        """Registers requests' ids, before the engine has them. False: the engine has ended. Raises
        EngineDeadError in a fork."""
        return self.put(lambda: self._register(request_ids, listener))

    def submit(self, prepared: Sequence[PreparedRequest], listener: Listener) -> None:
        """Queues a listener's registered requests: all of them, or none."""
        self.put(lambda: self._submit(prepared, listener))

    def abort(self, request_id: str) -> None:
        """Ends a request. Its listener gets a last output. Unknown ids are accepted."""
        self.put(lambda: self._abort(request_id))

    def forget(self, request_ids: Sequence[str], listener: Listener) -> None:
        """Aborts requests whose caller has left."""
        self.put(lambda: self._forget(request_ids, listener))

    def put(self, command: Callable[[], None]) -> bool:
        """Queues a command. False: the engine has ended. Raises EngineDeadError in a fork."""
        if (error := self.engine.client.fork_error) is not None:
            raise error
        with self._lock:
            if not self.ended:
                self._commands.put(command)
        self.engine.client.wake()
        return not self.ended

    def stop(self) -> None:
        """Asks the thread to end. Takes no lock, since the garbage collector may call it at any
        point."""
        self._stopping = True
        self._commands.put(None)
        self.engine.client.wake()

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread's end."""
        self._thread.join(timeout)

    def __await__(self) -> Generator[Any, None, None]:
        """Awaits the thread's end, in an event loop."""
        return asyncio.to_thread(self.join).__await__()

    def why(self) -> EngineDeadError:
        """Error for requests after the engine's end."""
        return (
            EngineDeadError("the engine has been shut down.")
            if self.error is None
            else _dead(self.error)
        )

    def health(self) -> Health:
        """The present health of the engine."""
        if self.error is not None:
            return Health("dead", _reason(self.error))
        if self._stopping or self.ended:
            return Health("closed", "the engine has been shut down")
        if not self.ready.done():
            return Health(
                "restarting" if self.num_restarts else "starting", self.engine.client.phase
            )
        engines = self.engine.client.engines
        if engines and not any(engine.status == "ready" for engine in engines):
            return Health(
                "restarting",
                next((engine.reason for engine in engines if engine.status == "restarting"), ""),
            )
        seconds = self.engine.seconds_since_progress
        bound = self.engine.config.engine.step_timeout
        if seconds > bound:
            return Health(
                "stalled", f"no progress for {seconds:.1f} s; step_timeout is {bound:g} s"
            )
        return Health("ready")

    def _at_exit(self) -> None:
        self.stop()
        self.join(_AT_EXIT)

    # In the engine's thread

    def _run(self) -> None:
        failure: ToolkitError | None = None
        try:
            while True:
                try:
                    if failure is not None:
                        self._restart(failure)
                    self._serve()
                    return
                except ToolkitError as error:
                    if not self._may_restart():
                        raise
                    failure = error
        except BaseException as error:
            self.error = error
        finally:
            self._end()

    def _serve(self) -> None:
        """Runs until the thread is stopped. Raises the error that kept the engine from starting, or
        ended it."""
        while not self.engine.wait_ready(_LOOK):
            if not self._run_commands():
                return
        self.ready.set_result(None)
        while self._run_commands():
            self._tell_of(self.engine.advance(_LOOK))

    def _tell_of(self, states: Sequence[AnyState]) -> None:
        """Informs callers of new outputs of their requests."""
        found = [(state, self._listeners.get(state.request_id)) for state in states]
        self._tell(
            [
                listener
                for state, listener in found
                if listener is not None and listener.wants(state.finished)
            ]
        )
        for state in states:
            if state.finished:
                self._listeners.pop(state.request_id, None)

    def _may_restart(self) -> bool:
        config = self.engine.config.engine
        started = self.ready.done() or self.num_restarts > 0
        # Each of several engines has been restarted as often as it may.
        return (
            bool(config.engine_process and not self.engine.client.engines)
            and started
            and self.num_restarts < config.restart_engine
        )

    def _restart(self, failure: ToolkitError) -> None:
        """Restarts the engine. Requests that the old one had end here. Requests that it never had
        wait for the new one."""
        self.num_restarts += 1
        most = self.engine.config.engine.restart_engine
        logger.error(
            "the engine has died, and is started anew (restart %d of at most %d): %s",
            self.num_restarts,
            most,
            failure,
        )
        if self.ready.done():
            self.ready = Future()
        lost = {
            request_id: listener
            for request_id, listener in self._listeners.items()
            if listener.states
        }
        self._tell(lost.values(), _dead(failure))
        for request_id in lost:
            del self._listeners[request_id]
        self.queue = self.engine.queue = QueueLimits(self.engine.config.limits)
        self.engine.restart()

    def _end(self) -> None:
        with self._lock:
            self.ended = True
        self._watchdog.stop()
        atexit.unregister(self._at_exit)
        # Requests that were registered after the last step get their answer too.
        while not self._commands.empty():
            if command := self._commands.get():
                with suppress(Exception):
                    command()
        self._tell(self._listeners.values(), self.why())
        self._listeners.clear()
        if not self.ready.done():
            self.ready.set_exception(self.error or self.why())
        self.engine.on_lost = None
        self.engine.close()

    def _run_commands(self) -> bool:
        """Runs the callers' commands. False: stop."""
        while not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _register(self, request_ids: Sequence[str], listener: Listener) -> None:
        if taken := next(
            (request_id for request_id in request_ids if request_id in self._listeners), None
        ):
            self._tell([listener], RequestError(f"request id {taken!r} is in use.", "request_id"))
        else:
            self._listeners.update(dict.fromkeys(request_ids, listener))

    def _submit(
        self,
        prepared: Sequence[PreparedRequest],
        listener: Listener,
        failure: BaseException | None = None,
    ) -> None:
        messages = [entry.message for entry in prepared]
        if any(self._listeners.get(message.request_id) is not listener for message in messages):
            return
        try:
            if failure is not None:
                raise failure
            held = self.engine.client.features
            stale = [
                entry for entry in prepared if entry.message.features and held.lacks(entry.message)
            ]
            if stale:
                # They were rendered for an earlier engine.
                self._render_again(
                    stale, listener, lambda failure: self._submit(prepared, listener, failure)
                )
                return
            self.queue.check(messages)
            listener.states = self.engine.submit_batch(prepared)
        except Exception as error:
            # Any error here concerns this caller alone: the others continue.
            self._tell([listener], error)
        else:
            for request_id in listener.aborted:
                self._abort(request_id)

    def _render_again(
        self,
        lost: Sequence[PreparedRequest],
        listener: Listener,
        then: Callable[[BaseException | None], None],
    ) -> None:
        """Renders requests again in their caller's event loop, since that is slow. Then calls
        `then` in this thread, with the error if there was one."""
        again = asyncio.to_thread(lambda: list(map(self.engine.processor.render_again, lost)))
        try:
            done = asyncio.run_coroutine_threadsafe(again, listener.loop)
        except RuntimeError as error:
            # The caller's event loop is closed.
            again.close()
            then(error)
            return
        done.add_done_callback(
            lambda done: done.cancelled() or self.put(lambda: then(done.exception()))
        )

    def _on_lost(self, state: AnyState, prepared: PreparedRequest) -> None:
        """Handles a request that was sent without data which the engine lacks."""
        if listener := self._listeners.get(state.request_id):
            self._render_again(
                [prepared],
                listener,
                lambda failure: self._tell_of(self.engine.send_again(state, prepared, failure)),
            )

    def _abort(self, request_id: str) -> None:
        if listener := self._listeners.get(request_id):
            if not listener.states:
                listener.aborted.add(request_id)
            elif self.engine.end(request_id):
                del self._listeners[request_id]
                self._tell([listener] if listener.wants(finished=True) else [])

    def _forget(self, request_ids: Sequence[str], listener: Listener) -> None:
        # Finished requests are gone already, and their ids may be in use again.
        ended = [
            request_id
            for request_id in dict.fromkeys(request_ids)
            if self._listeners.get(request_id) is listener
        ]
        for request_id in ended:
            del self._listeners[request_id]
        self.engine.end(ended)

    def _tell(self, listeners: Iterable[Listener], error: BaseException | None = None) -> None:
        """Wakes the listeners' callers: one call per event loop, however many of them it has."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Listener]] = {}
        for listener in listeners:
            by_loop.setdefault(listener.loop, []).append(listener)
        for loop, waiting in by_loop.items():
            # The event loop may be closed: no caller is left.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake_all, waiting, error)


def _wake_all(listeners: list[Listener], error: BaseException | None) -> None:
    for listener in listeners:
        listener.wake(error)


def _dead(error: BaseException) -> EngineDeadError:
    dead = EngineDeadError(f"the engine has died: {_reason(error)}")
    dead.__cause__ = error
    return dead


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, ToolkitError) else f"{type(error).__name__}: {error}"


class Listener:
    """One caller, who waits for one request or for several."""

    def __init__(self) -> None:
        """Must be made in the caller's event loop."""
        self.loop = asyncio.get_running_loop()
        self.states: Sequence[AnyState] = ()
        """States of the requests. Set once, by the engine's thread, when the engine has the
        requests."""
        self.aborted: set[str] = set()
        """Requests aborted before `states` was set. Only the engine's thread uses it."""
        self._error: BaseException | None = None
        self._news = asyncio.Event()

    def wants(self, finished: bool) -> bool:
        """Whether to wake the caller for an output of one request. Called in the engine's thread,
        once per output."""
        return True

    def wake(self, error: BaseException | None = None) -> None:
        """Wakes the caller: there are new outputs, or none will come any more. Called in the
        caller's event loop."""
        self._error = self._error or error
        self._news.set()

    async def _wait(self) -> None:
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error


class Stream(Listener):
    """Generating requests whose outputs are streamed. A slow caller gets the accumulated output at
    once."""

    def __init__(self, *, final_only: bool) -> None:
        """`final_only`: only the last output of each request is wanted."""
        super().__init__()
        self._final_only = final_only
        self._open: dict[int, AnyState] | None = None
        """Requests that have not given their last output, by number."""

    def wants(self, finished: bool) -> bool:
        return finished or not self._final_only

    @property
    def is_over(self) -> bool:
        """Whether every request has given its last output."""
        return self._open is not None and not self._open

    async def next(self) -> list[tuple[int, RequestOutput]]:
        """Waits for new outputs, and returns each with its request's number. Outputs are made here,
        not in the engine's thread."""
        while True:
            await self._wait()
            if self._open is None:
                self._open = dict(enumerate(self.states))
            found = []
            for number, state in list(self._open.items()):
                with state.lock:
                    output = state.next_output()
                if isinstance(output, RequestOutput):
                    found.append((number, output))
                    if output.finished:
                        del self._open[number]
            if found:
                return found


class Batch(Listener):
    """Several pooling requests. Their caller is woken once, when all of them have ended."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._num_left = size

    def wants(self, finished: bool) -> bool:
        self._num_left -= finished
        return self._num_left == 0

    async def results(self) -> list[PoolingRequestOutput]:
        """Results in the order in which the requests were submitted."""
        await self._wait()
        return [
            output
            for state in self.states
            if isinstance(output := state.snapshot(), PoolingRequestOutput)
        ]
