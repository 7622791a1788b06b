"""AsyncLLM: many requests at once from an event loop, over an engine that runs in a thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from llm_toolkit.config import VllmConfig
from llm_toolkit.engine.llm_engine import LLMEngine, PreparedRequest
from llm_toolkit.errors import EngineDeadError, RequestError
from llm_toolkit.outputs import RequestOutput
from llm_toolkit.params import SamplingParams
from llm_toolkit.plugin import Plugins
from llm_toolkit.prompts import Conversation, Prompt


class _Stream:
    """Carries one request's outputs from the engine's thread to its caller's event loop. A slow caller gets the newest state."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._latest: RequestOutput | BaseException | None = None
        self.aborted = False
        """Asked to end before the engine had the request. Touched by the engine's thread only."""

    def publish(self, item: RequestOutput | BaseException) -> None:
        """From the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._set, item)
        except RuntimeError:
            # The caller's event loop is closed: nobody is left to hear of it.
            return

    def _set(self, item: RequestOutput | BaseException) -> None:
        self._latest = item
        self._news.set()

    async def next(self) -> RequestOutput:
        await self._news.wait()
        self._news.clear()
        if isinstance(self._latest, BaseException):
            raise self._latest
        assert self._latest is not None
        return self._latest


class AsyncLLM:
    """An engine for servers and apps with an event loop.

        async with AsyncLLM(VllmConfig.make(model="tiny")) as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
                ...

    Its methods may be called from any event loop, of any thread.
    """

    def __init__(self, config: VllmConfig, *, plugins: Plugins | Sequence[object] = ()) -> None:
        """Loads the model, in the calling thread, and starts the engine's thread. Raises ToolkitError.

        The thread holds the model until `shutdown` or `close`.
        """
        self.engine = LLMEngine(config, plugins=plugins)
        self.config = self.engine.config
        self.renderer = self.engine.renderer
        self.plugins = self.engine.plugins
        self.error: BaseException | None = None
        """Why the engine died; None while it lives."""
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        """Touched by the engine's thread only."""
        self._ids = count()
        self._lock = threading.Lock()
        """Guards `_ended`, so that no command is queued that nobody will run."""
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="llm_toolkit-engine", daemon=True)
        self._thread.start()

    # For callers

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come: whole texts, not deltas; a text only grows. A caller that is slow gets merged states.

        Closing the iterator aborts the request. Raises RequestError before the first output, EngineDeadError when the engine dies.
        """
        return self._stream(lambda rid: self.engine.prepare(rid, prompt, params, priority=priority), request_id)

    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **render_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, for a conversation; `render_options` are Renderer.render_conversation's."""
        return self._stream(lambda rid: self.engine.prepare_chat(rid, messages, params, priority=priority, **render_options), request_id)

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iterator gets a last output with finish_reason "abort". Unknown ids are no error."""
        self._put(lambda: self._abort(request_id))

    async def shutdown(self) -> None:
        """Ends the engine and releases its memory; requests under way end with EngineDeadError."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """As `shutdown`, for callers without an event loop."""
        with self._lock:
            if not self._ended:
                self._commands.put(None)
        self._thread.join()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    async def _stream(self, prepare: Callable[[str], PreparedRequest], request_id: str | None) -> AsyncGenerator[RequestOutput, None]:
        self._check_alive()
        request_id = request_id if request_id is not None else f"async-{next(self._ids)}"
        if not isinstance(request_id, str):
            raise RequestError(f"a request id must be a text, not a {type(request_id).__name__}.", "request_id")
        stream = _Stream()
        if not self._put(lambda: self._register(request_id, stream)):
            raise self._dead()
        try:
            # Rendering and tokenizing may take long: not on the event loop.
            prepared = await asyncio.to_thread(prepare, request_id)
            self._put(lambda: self._submit(prepared, stream))
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            self._put(lambda: self._forget(request_id, stream))

    def _put(self, command: Callable[[], None]) -> bool:
        """Queues a command for the engine's thread; False when it has ended."""
        with self._lock:
            if not self._ended:
                self._commands.put(command)
            return not self._ended

    def _check_alive(self) -> None:
        if self._ended:
            raise self._dead()

    def _dead(self) -> EngineDeadError:
        if self.error is None:
            return EngineDeadError("the engine has been shut down.")
        dead = EngineDeadError(f"the engine has died: {type(self.error).__name__}: {self.error}")
        dead.__cause__ = self.error
        return dead

    # In the engine's thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                for output in self.engine.step() if self.engine.has_unfinished_requests() else ():
                    self._publish(output)
        except BaseException as error:
            self.error = error
        finally:
            self._end()

    def _take_commands(self) -> bool:
        """Runs what callers asked for; waits where there is nothing else to do. False: shut down."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_unfinished_requests())
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _register(self, request_id: str, stream: _Stream) -> None:
        if request_id in self._streams:
            stream.publish(RequestError(f"request id {request_id!r} is in use.", "request_id"))
        else:
            self._streams[request_id] = stream

    def _submit(self, prepared: PreparedRequest, stream: _Stream) -> None:
        request_id = prepared.message.request_id
        if self._streams.get(request_id) is not stream:
            return
        try:
            self.engine.submit(prepared)
        except Exception as error:
            # Whatever it is, it is this request's: the others go on.
            stream.publish(error)
        else:
            if stream.aborted:
                self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        if stream := self._streams.get(request_id):
            stream.aborted = True
        for output in self.engine.abort(request_id):
            self._publish(output)

    def _forget(self, request_id: str, stream: _Stream) -> None:
        """The caller has left; a finished request is gone already, and its id may be another's."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self.engine.abort(request_id)

    def _publish(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is not None:
            stream.publish(output)
            if output.finished:
                del self._streams[output.request_id]

    def _end(self) -> None:
        with self._lock:
            self._ended = True
        # Requests that were registered after the last step get their answer too.
        while not self._commands.empty():
            if command := self._commands.get():
                with suppress(Exception):
                    command()
        for stream in self._streams.values():
            stream.publish(self._dead())
        self._streams.clear()
        self.engine.shutdown()
