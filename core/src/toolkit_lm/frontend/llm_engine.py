"""LLMEngine: the loop in public. Prompts in, texts out, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypedDict, Unpack

from toolkit_lm.config import VllmConfig
from toolkit_lm.config.tasks import Task
from toolkit_lm.engine.client import EngineClient
from toolkit_lm.engine.process.launch import EngineProcess
from toolkit_lm.engine.start import start_engine
from toolkit_lm.errors import EngineDeadError, RequestError, ToolkitError
from toolkit_lm.frontend.queue import QueueLimits
from toolkit_lm.messages import EngineOutput, EngineOutputs, EngineRequest
from toolkit_lm.outputs import AnyRequestOutput
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import Plugins
from toolkit_lm.pooling import check_params
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.processing.pooling_inputs import PoolingTexts
from toolkit_lm.processing.pooling_state import AnyState, PoolingState
from toolkit_lm.processing.request_state import RequestState
from toolkit_lm.processing.validation import check_bounds, check_options, check_processors, check_token_ids, cut_prompt, tokenize_words
from toolkit_lm.prompts import Conversation, Prompt, TextPair, parse_prompt
from toolkit_lm.renderer import RenderedText, Renderer
from toolkit_lm.resolution.resolution import resolve_configured
from toolkit_lm.scheduler import RequestLimits

_NO_SAMPLING = SamplingParams()
"""Of requests that pool. It is checked when it is made, which takes a while."""


class PreparedRequest(NamedTuple):
    """A request that has been rendered and checked, and not yet been queued."""

    message: EngineRequest
    prompt: str | None


class RequestOptions(TypedDict, total=False):
    """How one request is handled, apart from what is drawn."""

    priority: int
    """Smaller is served first, under the policy 'priority'. 0 where not given."""
    timeout: float | None
    """Seconds after which it ends with finish_reason "timeout", wherever it is."""
    cache_salt: str | None
    """Only requests of the same salt share cached prefixes: it keeps tenants from learning what others sent."""
    context: dict[str, str]
    """Attached to the request's events, for plugins that watch: trace headers, say."""


class LLMEngine:
    """Renderer, engine and output texts in the caller's own thread.

        engine = LLMEngine.from_config(VllmConfig.make(model="tiny"))
        engine.add_request("1", "Once upon a time", SamplingParams(max_tokens=32))
        while engine.has_unfinished_requests():
            for output in engine.step():
                ...

    The engine runs in this process, or, with the option `engine_process`, in one of its own. `prepare` and `prepare_chat` may be called
    from any thread; all else from one at a time.
    """

    def __init__(self, config: VllmConfig, *, plugins: Plugins | Sequence[object] = (), wait: bool = True) -> None:
        """Loads the plugins (or takes loaded ones), resolves the config and loads the model. Raises ToolkitError.

        `wait=False` returns before an engine process is ready: call `wait_ready` before the first request.
        """
        # Of a start, an engine process takes the longest: it begins to import at once.
        process = EngineProcess() if config.engine.engine_process else None
        try:
            self.plugins = plugins if isinstance(plugins, Plugins) else Plugins.load(config.plugins, plugins)
            self._asked = self.config = resolve_configured(self.plugins.configure(config), self.plugins)
            self.client = self._started(process)
        except BaseException:
            if process is not None:
                process.end()
            raise
        self._closed = False
        try:
            self.renderer: Renderer = self.plugins.renderers.load(self.config.renderer.renderer)(self.config)
            self.queue = QueueLimits(self.config.limits)
            self.texts = PoolingTexts(self.config, self.renderer, self.plugins)
            self._limits: RequestLimits | None = None
            self.tasks: tuple[Task, ...] = ()
            """What the model serves, once the engine is ready."""
            self._states: dict[str, AnyState] = {}
            self._ready = False
            self._busy_since = 0.0
            """time.monotonic() at which the engine got work after it had none."""
            if wait:
                self.wait_ready()
        except BaseException:
            self.shutdown()
            raise

    def _started(self, process: EngineProcess | None = None) -> EngineClient:
        """A new engine, with what watches it."""
        self.plugins.watch(self._asked)
        try:
            return start_engine(self._asked, self.plugins, process)
        except BaseException:
            self.plugins.close()
            raise

    @classmethod
    def from_config(cls, config: VllmConfig, *, plugins: Plugins | Sequence[object] = ()) -> LLMEngine:
        return cls(config, plugins=plugins)

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Waits until the engine has loaded and warmed up. Raises what kept it from starting.

        False when `timeout` seconds, or a `wake` of the client, came first.
        """
        info = self.client.wait_ready(timeout)
        if info is None:
            return False
        self.config = info.config
        self._limits = RequestLimits(info.config, info.kv_cache, info.pooling)
        generates: tuple[Task, ...] = ("generate",) if self._limits.generates else ()
        self.tasks = (*generates, *info.pooling)
        self._busy_since, self._ready = time.monotonic(), True
        return True

    def restart(self) -> None:
        """Ends the engine, forgets all requests, and starts another one, which may still be loading."""
        self.client.shutdown()
        self.plugins.close()
        self._states.clear()
        self.queue = QueueLimits(self.config.limits)
        self.client = self._started()

    # Requests

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]) -> None:
        """Renders, checks and queues a prompt. Raises RequestError; the other requests go on."""
        self.submit(self.prepare(request_id, prompt, params, **options))

    def add_chat(
        self,
        request_id: str,
        messages: Conversation,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **render_options: Any,
    ) -> None:
        """Renders a conversation through the chat template, and queues it. `render_options` are Renderer.render_conversation's."""
        self.submit(self.prepare_chat(request_id, messages, params, options, **render_options))

    def prepare(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> PreparedRequest:
        """Renders and checks a prompt. Raises RequestError. May be called from any thread."""
        parsed = parse_prompt(prompt)
        token_ids, _ = self.renderer.render_prompt(parsed)
        return self._prepared(request_id, token_ids, parsed.get("prompt"), params, options)

    def prepare_chat(
        self,
        request_id: str,
        messages: Conversation,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **render_options: Any,
    ) -> PreparedRequest:
        """Renders and checks a conversation. Raises RequestError. May be called from any thread."""
        token_ids, _ = self.renderer.render_conversation(messages, **render_options)
        return self._prepared(request_id, token_ids, None, params, options or {})

    def prepare_pooling(
        self,
        request_id: str,
        prompt: Prompt | TextPair,
        params: PoolingParams,
        *,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> PreparedRequest:
        """Renders and checks a prompt, or a pair of texts, for a pooling task. Raises RequestError. May be called from any thread.

        `prompt_name` names one of the checkpoint's prompts, which goes before the text. `truncate_prompt_tokens` cuts what is longer, -1 to
        what the model takes. `instruction` is for score templates.
        """
        (rendered,) = self.texts.render(
            [prompt], prompt_name=prompt_name, truncate_prompt_tokens=truncate_prompt_tokens, instruction=instruction
        )
        return self.prepare_rendered(request_id, rendered, prompt if isinstance(prompt, str) else None, params, options)

    def prepare_rendered(
        self, request_id: str, rendered: RenderedText, prompt: str | None, params: PoolingParams, options: RequestOptions
    ) -> PreparedRequest:
        """As `prepare_pooling`, for what `texts.render` gave. Raises RequestError. May be called from any thread."""
        self.check_pooling(params)
        message = self._message(request_id, rendered.token_ids, _NO_SAMPLING, options)
        message.pooling, message.second_text_start = params, rendered.second_text_start
        message.num_attended = rendered.num_attended
        if params.task == "embed":
            message.pooling_start = rendered.pooling_start
        self._check(message)
        return PreparedRequest(message, prompt)

    def check_pooling(self, params: PoolingParams) -> None:
        """Raises RequestError for a task that the model does not serve, or what the task cannot give. May be called from any thread."""
        size = self._ready_limits.rules(params.task).size
        if size is not None:
            check_params(params, size)

    def _prepared(
        self, request_id: str, token_ids: list[int], prompt: str | None, params: SamplingParams | None, options: RequestOptions
    ) -> PreparedRequest:
        params = params or SamplingParams()
        check_bounds(params, self.config.limits)
        check_processors(params, self.plugins.logits_processors)
        message = self._message(request_id, cut_prompt(token_ids, params, self.config.max_model_len), params, options)
        message.words = tokenize_words(params, self.renderer)
        self._check(message)
        return PreparedRequest(message, prompt)

    def _message(self, request_id: str, token_ids: list[int], params: SamplingParams, options: RequestOptions) -> EngineRequest:
        if not isinstance(request_id, str):
            raise RequestError(f"a request id must be a text, not a {type(request_id).__name__}.", "request_id")
        check_options(options)
        now, timeout = time.monotonic(), options.get("timeout")
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self.renderer.eos_token_ids,
            priority=options.get("priority", 0),
            arrival_time=now,
            deadline=None if timeout is None else now + timeout,
            cache_salt=options.get("cache_salt"),
            context=options.get("context", {}),
        )

    def _check(self, message: EngineRequest) -> None:
        check_token_ids(message, self.config.hf_config.get("vocab_size"))
        self._ready_limits.check(message)

    @property
    def _ready_limits(self) -> RequestLimits:
        assert self._limits is not None, "the engine is not ready: call wait_ready first"
        return self._limits

    def submit(self, prepared: PreparedRequest) -> AnyState:
        """Queues a prepared request. Raises RequestError where its id is in use, EngineDeadError after `shutdown`."""
        [state] = self.submit_batch([prepared])
        return state

    def submit_batch(self, prepared: Sequence[PreparedRequest]) -> list[AnyState]:
        """Queues prepared requests before the next step: all of them, or none where it raises, as `submit` does."""
        self._check_open()
        states: dict[str, AnyState] = {}
        for message, prompt in prepared:
            if message.request_id in self._states or message.request_id in states:
                raise RequestError(f"request id {message.request_id!r} is in use.", "request_id")
            pooled = message.pooling is not None
            states[message.request_id] = PoolingState(message, prompt) if pooled else RequestState(message, prompt, self.renderer)
        messages = [one.message for one in prepared]
        self.client.add(messages)
        if not self._states:
            self._busy_since = time.monotonic()
        self._states.update(states)
        self.queue.add(messages)
        return list(states.values())

    def abort(self, request_ids: str | Iterable[str]) -> list[AnyRequestOutput]:
        """Ends requests; their blocks are free at once. Returns their last outputs. Unknown ids are no error."""
        outputs = []
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if state := self._states.pop(request_id, None):
                self.client.finish(request_id)
                self.queue.discard(request_id)
                with state.lock:
                    state.end("abort")
                outputs.append(state.snapshot())
        return outputs

    def reset_prefix_cache(self) -> None:
        """Forgets what is cached of prompts that were seen before. Requests under way go on."""
        self._check_open()
        self.client.reset_prefix_cache()

    # The loop

    def has_unfinished_requests(self) -> bool:
        return bool(self._states)

    @property
    def silence(self) -> float:
        """For how many seconds the engine has given no sign of life, while there was work. From any thread."""
        if not (self._ready and self._states):
            return 0.0
        return time.monotonic() - max(self.client.progress_time, self._busy_since)

    def step(self) -> list[AnyRequestOutput]:
        """Computes one step. Returns the requests that got something: whole texts so far, not deltas."""
        return [state.snapshot() for state in self.advance()]

    def advance(self, timeout: float | None = None) -> list[AnyState]:
        """As `step`, without the outputs' copies: for callers that need only some of them, before the next call.

        `timeout`: seconds to wait for an engine process at most.
        """
        self._check_open()
        if timeout is None and not self._states:
            timeout = 0
        return self._take(self.client.step(timeout))

    def _take(self, news: EngineOutputs) -> list[AnyState]:
        self.queue.admit(news.admitted)
        touched: dict[str, AnyState] = {}
        has_finished_some = False
        for output in news.outputs:
            if state := self._states.get(output.request_id):
                touched[output.request_id] = state
                has_finished_some |= self._apply(state, output)
        for request_id, state in touched.items():
            if state.finished:
                del self._states[request_id]
                self.queue.discard(request_id)
        for event in news.events:
            self.plugins.event(event)
        # What the engine has to say to that may not wait for a next step: there may be none.
        more = self._take(self.client.news()) if has_finished_some else []
        return [*touched.values(), *more]

    def _apply(self, state: AnyState, output: EngineOutput) -> bool:
        """True: the engine was told that a sequence has ended."""
        try:
            with state.lock:
                ends = state.apply(output)
            if ends:
                self.client.finish(output.request_id, "stop", output.index)
            return ends
        except Exception as error:
            # A renderer is a plugin: what it does wrong for one request ends that one.
            renderer = self.config.renderer.renderer
            with state.lock:
                state.end("error", f"renderer {renderer!r} failed on the output: {type(error).__name__}: {error}")
            self.client.finish(output.request_id, "error")
            return True

    def shutdown(self) -> None:
        """Ends the engine and releases its memory. It cannot be used after that."""
        closed, self._closed = self._closed, True
        try:
            if not closed:
                self._tell_last_events()
            self.client.shutdown()
        finally:
            self.plugins.close()

    def _tell_last_events(self) -> None:
        with suppress(ToolkitError):
            for event in self.client.news().events:
                self.plugins.event(event)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine has been shut down.")

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
