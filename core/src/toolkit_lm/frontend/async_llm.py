"""AsyncLLM: many requests at once from event loops, over an engine in a process of its own."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from functools import partial
from itertools import count
from typing import Any, TypeVar, Unpack

from toolkit_lm.config import VllmConfig
from toolkit_lm.config.tasks import PoolingTask, Task
from toolkit_lm.engine import EngineState
from toolkit_lm.engine.process.launch import EngineProcess
from toolkit_lm.errors import EngineDeadError, RequestError, nearest
from toolkit_lm.frontend.calls import Answer, pass_on
from toolkit_lm.frontend.engine_thread import Batch, EngineThread, Listener, Stream
from toolkit_lm.frontend.health import Health
from toolkit_lm.frontend.llm_engine import LLMEngine
from toolkit_lm.frontend.pooling_mixin import prepared_for_pooling
from toolkit_lm.frontend.preparation import Preparation
from toolkit_lm.outputs import PoolingRequestOutput, RequestOutput
from toolkit_lm.params import RequestOutputKind, SamplingParams
from toolkit_lm.plugin import Plugins
from toolkit_lm.pooling import TextOptions
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.processing.processor import Processor
from toolkit_lm.processing.requests import PreparedRequest, RequestOptions
from toolkit_lm.prompts import Conversation, Prompt, TextPair, listed
from toolkit_lm.renderer import ConversationOptions, Renderer

AnyListener = TypeVar("AnyListener", bound=Listener)
Prepare = Callable[[], Awaitable[list[PreparedRequest]]]
"""Function that makes a call's requests, once the engine is ready."""


class EncodeOptions(RequestOptions, TextOptions, total=False):
    """How pooling requests are read and handled."""

    pooling_task: PoolingTask | None
    """Task for params that name none."""


class AsyncLLM:
    """An engine for servers and apps with an event loop.

        async with AsyncLLM(VllmConfig.make(model="tiny")) as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
                ...

    The engine runs in a process of its own, unless `engine_process` is False; one that was not
    closed ends with this process. Its methods may be called from any event loop, of any thread.
    """

    def __init__(
        self,
        config: VllmConfig,
        *,
        plugins: Plugins | Sequence[object] = (),
        wait: bool = True,
        process: EngineProcess | None = None,
    ) -> None:
        """Starts an engine and waits until it is ready. Raises the ToolkitError that keeps it from
        starting.

        `wait=False` returns while an engine process loads: `wait_ready` waits for it, and so do
        requests. With `engine_process` False the model is loaded here, in the calling thread, and
        held until `close`. `process`: as LLMEngine's.
        """
        if config.engine.engine_process is None:
            config = config.replace(engine_process=True)
        self.engine = LLMEngine(config, plugins=plugins, wait=False, process=process)
        self.plugins = self.engine.plugins
        self.served_model_name = self.engine.config.served_model_name
        """The model's name for clients, after plugins' changes."""
        self._ids = count()
        self._preparation = Preparation(self.engine.processor)
        self._thread = EngineThread(self.engine)
        weakref.finalize(self, self._thread.stop)
        if wait:
            try:
                self._thread.ready.result()
            except BaseException:
                self.close()
                raise

    @property
    def config(self) -> VllmConfig:
        """The resolved config. Its device is known when the engine is ready."""
        return self.engine.config

    @property
    def renderer(self) -> Renderer:
        return self.engine.renderer

    @property
    def processor(self) -> Processor:
        """Makes requests from prompts. Its methods are slow: do not call them in an event loop's
        thread."""
        return self.engine.processor

    @property
    def num_queued_tokens(self) -> int:
        """Number of prompt tokens of the requests in the queue."""
        return self._thread.queue.num_tokens

    @property
    def error(self) -> BaseException | None:
        """The error with which the engine died, or did not start; None while it lives."""
        return self._thread.error

    @property
    def num_restarts(self) -> int:
        """Number of restarts of a dead engine process."""
        return self._thread.num_restarts + sum(engine.num_restarts for engine in self.engines)

    @property
    def engines(self) -> Sequence[EngineState]:
        """State of each engine, by its number, if there are several (data_parallel_size). May be
        called from any thread."""
        return self.engine.client.engines

    def health(self) -> Health:
        """The engine's health. Never waits, and may be called from any thread."""
        return self._thread.health()

    async def wait_ready(self) -> None:
        """Waits until the engine has loaded and warmed up. Raises the ToolkitError that kept it
        from starting, with the root cause."""
        if (error := self.engine.client.fork_error) is not None:
            raise error
        await asyncio.shield(asyncio.wrap_future(self._thread.ready))

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields outputs as they come. By default each holds the whole text so far; with the
        `output_kind` DELTA, only the new text.

        A slow caller gets fewer, larger outputs. Closing the iterator aborts the request. Raises
        RequestError before the first output, including QueueFullError, and EngineDeadError when the
        engine dies.
        """
        ids = [self._new_id() if request_id is None else request_id]
        prepare = partial(self._preparation.prepare_batch, ids, [prompt], sampling_params, options)
        return self._single(ids, prepare, sampling_params)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        options: RequestOptions | None = None,
        **render_options: Unpack[ConversationOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers a conversation, and yields outputs as `generate` does."""
        ids = [self._new_id() if request_id is None else request_id]
        prepare = partial(
            self._preparation.prepare_chat_batch,
            ids,
            [messages],
            sampling_params,
            options,
            **render_options,
        )
        return self._single(ids, prepare, sampling_params)

    def chat_many(
        self,
        conversations: Sequence[Conversation],
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        **render_options: Unpack[ConversationOptions],
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """Answers conversations, and yields outputs as `generate_many` does."""
        ids = [self._new_id() for _ in conversations]
        prepare = partial(
            self._preparation.prepare_chat_batch,
            ids,
            conversations,
            sampling_params,
            options,
            **render_options,
        )
        return self._outputs(ids, prepare, sampling_params)

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """Generates for many prompts at once, which reach the engine together. With thousands of
        them, each step admits some.

        Outputs that arrive together are yielded together, each with its prompt's index. A bad
        prompt is an error for all of them, before any is computed. Closing the iterator aborts all
        of them.
        """
        ids = [self._new_id() for _ in prompts]
        prepare = partial(self._preparation.prepare_batch, ids, prompts, sampling_params, options)
        return self._outputs(ids, prepare, sampling_params)

    async def encode(
        self,
        prompt: Prompt | TextPair,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[EncodeOptions],
    ) -> PoolingRequestOutput:
        """Runs a pooling task on a prompt or a pair of texts. Cancelling it aborts the request.

        Raises RequestError, including QueueFullError, and EngineDeadError.
        """
        request_ids = [self._new_id() if request_id is None else request_id]
        [output] = await self.encode_many(
            listed(prompt), pooling_params, request_ids=request_ids, **options
        )
        return output

    async def encode_many(
        self,
        prompts: Prompt | TextPair | Sequence[Prompt | TextPair],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        **options: Unpack[EncodeOptions],
    ) -> list[PoolingRequestOutput]:
        """Runs a pooling task on many prompts at once, which reach the engine together: cheaper
        than as many calls of `encode`.

        `pooling_params` apply to all of them, or there is one per prompt.

        A bad prompt is an error for all of them, before any is computed; the error gives its name
        of `names`, or its number. A prompt that fails later has its error in its output. For
        `max_queued_requests` they count as one request. Cancelling the call aborts all of them.
        """
        many = listed(prompts)
        ids = [self._new_id() for _ in many] if request_ids is None else list(request_ids)
        arguments: dict[str, Any] = {**options, "names": names}
        known = {*EncodeOptions.__annotations__, *self.processor.parts.keywords}
        for name in options.keys() - known:
            if arguments[name] is not None:
                raise RequestError(f"unknown option {name!r}. {nearest(name, known)}", name)
        if not many and not ids:
            return []
        prepare = partial(
            asyncio.to_thread,
            prepared_for_pooling,
            self.processor,
            ids,
            many,
            pooling_params,
            arguments,
        )
        async with self._served(ids, prepare, Batch(len(ids))) as batch:
            results = await batch.results()
        found = {output.request_id: output for output in results}
        return [found[request_id] for request_id in ids]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Tasks that the model serves, once the engine is ready."""
        return self.engine.tasks

    async def abort(self, request_id: str) -> None:
        """Ends a request. Its iterator gets a last output with finish_reason "abort". Unknown ids
        are accepted."""
        self._thread.abort(request_id)

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes. Running requests continue. Raises EngineDeadError."""
        if not self._thread.put(self.engine.reset_prefix_cache):
            raise self._thread.why()

    async def call_workers(
        self, method: str, payload: object = None, answer: type[Answer] | None = None
    ) -> list[Answer]:
        """Calls a method of the workers, as `LLM.call_workers` does. Running requests continue:
        workers take the call between two steps."""
        await self.wait_ready()
        called: Future[list[Answer]] = Future()

        def call() -> None:
            try:
                pass_on(self.engine.call_workers(method, payload, answer), called)
            except Exception as error:
                if called.set_running_or_notify_cancel():
                    called.set_exception(error)
                if isinstance(error, EngineDeadError):
                    raise

        if not self._thread.put(call):
            raise self._thread.why()
        return await asyncio.wrap_future(called)

    def close(self) -> None:
        """Ends the engine and releases its memory; running requests end with EngineDeadError. The
        object cannot be used after that. Safe to call twice.

        The call blocks until the end: in an event loop, use `aclose`.
        """
        self._thread.stop()
        self._thread.join()

    async def aclose(self) -> None:
        """Awaitable `close`."""
        self._thread.stop()
        await self._thread

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def _single(
        self,
        ids: list[str],
        prepare: Prepare,
        params: SamplingParams | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        async with aclosing(self._outputs(ids, prepare, params)) as outputs:
            async for found in outputs:
                for _, output in found:
                    yield output

    async def _outputs(
        self,
        request_ids: list[str],
        prepare: Prepare,
        params: SamplingParams | None,
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        if not request_ids:
            return
        final_only = params is not None and params.output_kind is RequestOutputKind.FINAL_ONLY
        async with self._served(request_ids, prepare, Stream(final_only=final_only)) as stream:
            while not stream.is_over:
                yield await stream.next()

    @asynccontextmanager
    async def _served(
        self,
        request_ids: list[str],
        prepare: Prepare,
        listener: AnyListener,
    ) -> AsyncIterator[AnyListener]:
        """Context in which the engine works on the requests."""
        for request_id in request_ids:
            if not isinstance(request_id, str):
                raise RequestError(
                    f"a request id must be a text, not a {type(request_id).__name__}.", "request_id"
                )
        if not self._thread.register(request_ids, listener):
            raise self._thread.why()
        try:
            try:
                await self.wait_ready()
            except Exception:
                raise self._thread.why() from self.error
            self._thread.submit(await prepare(), listener)
            yield listener
        finally:
            self._thread.forget(request_ids, listener)

    def _new_id(self) -> str:
        return f"async-{next(self._ids)}"
