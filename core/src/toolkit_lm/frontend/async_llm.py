"""AsyncLLM: many requests at once from event loops, over an engine in a process of its own."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from itertools import count
from typing import Any, TypeVar, Unpack

from toolkit_lm.config import VllmConfig
from toolkit_lm.config.tasks import PoolingTask, Task
from toolkit_lm.engine import EngineState
from toolkit_lm.engine.process.launch import EngineProcess
from toolkit_lm.errors import RequestError, nearest
from toolkit_lm.frontend.engine_thread import EngineThread
from toolkit_lm.frontend.health import Health
from toolkit_lm.frontend.listener import Batch, Listener, Stream
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
"""What makes a call's requests, once the engine is ready."""


class EncodeOptions(RequestOptions, TextOptions, total=False):
    """How pooling requests are read and handled."""

    pooling_task: PoolingTask | None
    """Stands in for params that say nothing else."""


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
        """Starts an engine and waits until it is ready. Raises what keeps it from starting:
        ToolkitError.

        `wait=False` returns while an engine process loads: `wait_ready` waits for it, and so do
        requests. With `engine_process` False the model is loaded here, in the calling thread, and
        held until `close`. `process`: as LLMEngine's.
        """
        if config.engine.engine_process is None:
            config = config.replace(engine_process=True)
        self.engine = LLMEngine(config, plugins=plugins, wait=False, process=process)
        self.plugins = self.engine.plugins
        self.served_model_name = self.engine.config.served_model_name
        """What clients call the model, as plugins left it."""
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
        """The resolved config; its device is settled when the engine is ready."""
        return self.engine.config

    @property
    def renderer(self) -> Renderer:
        return self.engine.renderer

    @property
    def processor(self) -> Processor:
        """What makes requests of prompts. Its methods take a while: not for an event loop's
        thread."""
        return self.engine.processor

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of the requests that wait for a place in the batch."""
        return self._thread.queue.num_tokens

    @property
    def error(self) -> BaseException | None:
        """Why the engine died, or did not start; None while it lives."""
        return self._thread.error

    @property
    def num_restarts(self) -> int:
        """How many times a dead engine process was started anew."""
        return self._thread.num_restarts + sum(one.num_restarts for one in self.engines)

    @property
    def engines(self) -> Sequence[EngineState]:
        """Where there are several (data_parallel_size): each of them, by its number. From any
        thread."""
        return self.engine.client.engines

    def health(self) -> Health:
        """How the engine is. It never waits, and may be called from any thread."""
        return self._thread.health()

    async def wait_ready(self) -> None:
        """Waits until the engine has loaded and warmed up. Raises what kept it from starting:
        ToolkitError, with the root cause."""
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
        """Outputs as they come. By default each holds the whole text so far; the `output_kind`
        DELTA gives what is new.

        A caller that is slow gets fewer, larger outputs. Closing the iterator aborts the request.
        Raises RequestError before the first output, QueueFullError among them; EngineDeadError when
        the engine dies.
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
        """As `generate`, for a conversation."""
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
        """As `generate_many`, for conversations."""
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
        """As `generate`, for many prompts at once, which reach the engine together. Of thousands,
        each step admits some.

        Outputs that come together are given together, each with its prompt's number. A bad prompt
        is an error for all of them, before any is computed. Closing the iterator aborts them all.
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
        """One pooling task on a prompt or a pair of texts. Cancelling it aborts the request.

        Raises RequestError, QueueFullError among them, and EngineDeadError.
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
        """As `encode`, for many prompts at once, which reach the engine together: cheaper than so
        many calls of `encode`.

        `pooling_params` are for all of them, or one for each.

        A bad prompt is an error for all of them, before any is computed; it is called by its name
        of `names`, or its number. One that fails later has its error in its output. In
        `max_queued_requests` they count as one request. Cancelling it aborts them all.
        """
        many = listed(prompts)
        ids = [self._new_id() for _ in many] if request_ids is None else list(request_ids)
        given: dict[str, Any] = {**options, "names": names}
        for name in options.keys() - EncodeOptions.__annotations__.keys():
            if given[name] is not None:
                raise RequestError(
                    f"unknown option {name!r}. {nearest(name, EncodeOptions.__annotations__)}", name
                )
        if not many and not ids:
            return []
        prepare = partial(
            asyncio.to_thread,
            prepared_for_pooling,
            self.processor,
            ids,
            many,
            pooling_params,
            given,
        )
        async with self._served(ids, prepare, Batch(len(ids))) as batch:
            results = await batch.results()
        found = {output.request_id: output for output in results}
        return [found[request_id] for request_id in ids]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What the model serves, once the engine is ready."""
        return self.engine.tasks

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iterator gets a last output with finish_reason "abort". Unknown ids
        are no error."""
        self._thread.abort(request_id)

    async def reset_prefix_cache(self) -> None:
        """Forgets what is cached of prompts that were seen before. Requests under way go on. Raises
        EngineDeadError."""
        if not self._thread.put(self.engine.reset_prefix_cache):
            raise self._thread.why()

    def close(self) -> None:
        """Ends the engine and releases its memory; requests under way end with EngineDeadError. It
        cannot be used after that. Safe to call twice.

        It waits for that: in an event loop, `aclose` leaves others their turn.
        """
        self._thread.stop()
        self._thread.join()

    async def aclose(self) -> None:
        """As `close`, awaited."""
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
        """Has the engine work on requests, until the end of the block."""
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
