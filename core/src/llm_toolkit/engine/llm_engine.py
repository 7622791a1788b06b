"""LLMEngine: the loop in public. Prompts in, texts out, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from llm_toolkit.config import VllmConfig
from llm_toolkit.engine.core import EngineCore
from llm_toolkit.engine.output import RequestState
from llm_toolkit.engine.parameters import check_processors, tokenize_words
from llm_toolkit.engine.resolve import resolve
from llm_toolkit.errors import EngineDeadError, RequestError
from llm_toolkit.executor import InProcessExecutor
from llm_toolkit.messages import EngineOutput, EngineRequest
from llm_toolkit.outputs import RequestOutput
from llm_toolkit.params import SamplingParams
from llm_toolkit.plugin import Plugins
from llm_toolkit.prompts import Conversation, Prompt, parse_prompt
from llm_toolkit.renderer import Renderer


class PreparedRequest(NamedTuple):
    """A request that has been rendered and checked, and not yet been queued."""

    message: EngineRequest
    prompt: str | None


class LLMEngine:
    """Renderer, EngineCore and output texts in the caller's own thread.

        engine = LLMEngine.from_config(VllmConfig.make(model="tiny"))
        engine.add_request("1", "Once upon a time", SamplingParams(max_tokens=32))
        while engine.has_unfinished_requests():
            for output in engine.step():
                ...

    `prepare` and `prepare_chat` may be called from any thread; all else from one at a time.
    """

    def __init__(self, config: VllmConfig, *, plugins: Plugins | Sequence[object] = ()) -> None:
        """Loads the plugins (or takes loaded ones), resolves the config and loads the model. Raises ToolkitError."""
        self.plugins = plugins if isinstance(plugins, Plugins) else Plugins.load(config.plugins, plugins)
        self.config = resolve(config, self.plugins)
        self.renderer: Renderer = self.plugins.renderers.load(self.config.renderer.renderer)(self.config)
        self.core = EngineCore(self.config, self.plugins, InProcessExecutor(self.config, self.plugins))
        self._states: dict[str, RequestState] = {}
        self._closed = False

    @classmethod
    def from_config(cls, config: VllmConfig, *, plugins: Plugins | Sequence[object] = ()) -> LLMEngine:
        return cls(config, plugins=plugins)

    # Requests

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> None:
        """Renders, checks and queues a prompt. Raises RequestError; the other requests go on."""
        self.submit(self.prepare(request_id, prompt, params, priority=priority))

    def add_chat(
        self, request_id: str, messages: Conversation, params: SamplingParams | None = None, *, priority: int = 0, **render_options: Any
    ) -> None:
        """Renders a conversation through the chat template, and queues it. `render_options` are Renderer.render_conversation's."""
        self.submit(self.prepare_chat(request_id, messages, params, priority=priority, **render_options))

    def prepare(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> PreparedRequest:
        """Renders and checks a prompt. Raises RequestError. May be called from any thread."""
        parsed = parse_prompt(prompt)
        token_ids, _ = self.renderer.render_prompt(parsed)
        return self._prepared(request_id, token_ids, parsed.get("prompt"), params, priority)

    def prepare_chat(
        self, request_id: str, messages: Conversation, params: SamplingParams | None = None, *, priority: int = 0, **render_options: Any
    ) -> PreparedRequest:
        """Renders and checks a conversation. Raises RequestError. May be called from any thread."""
        token_ids, _ = self.renderer.render_conversation(messages, **render_options)
        return self._prepared(request_id, token_ids, None, params, priority)

    def _prepared(
        self, request_id: str, token_ids: list[int], prompt: str | None, params: SamplingParams | None, priority: int
    ) -> PreparedRequest:
        if not isinstance(request_id, str):
            raise RequestError(f"a request id must be a text, not a {type(request_id).__name__}.", "request_id")
        if type(priority) is not int or abs(priority) >= 2**63:
            raise RequestError("priority must be an integer of at most 64 bits.", "priority")
        params = params or SamplingParams()
        limits = self.config.limits
        if params.n > limits.max_n:
            raise RequestError(f"n is {params.n}; this engine allows at most {limits.max_n} (max_n).", "n")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > limits.max_logprobs:
                raise RequestError(
                    f"{name} is {getattr(params, name)}; this engine allows at most {limits.max_logprobs} (max_logprobs).", name
                )
        check_processors(params, self.plugins.logits_processors)
        message = EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self.renderer.eos_token_ids,
            words=tokenize_words(params, self.renderer),
            priority=priority,
            arrival_time=time.monotonic(),
        )
        self.core.check(message)
        return PreparedRequest(message, prompt)

    def submit(self, prepared: PreparedRequest) -> None:
        """Queues a prepared request. Raises RequestError where its id is in use, EngineDeadError after `shutdown`."""
        self._check_open()
        state = RequestState(prepared.message, prepared.prompt, self.renderer)
        self.core.add_request(prepared.message)
        self._states[state.request_id] = state

    def abort(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """Ends requests; their blocks are free at once. Returns their last outputs. Unknown ids are no error."""
        outputs = []
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self.core.finish(request_id)
            if state := self._states.pop(request_id, None):
                state.end("abort")
                outputs.append(state.snapshot())
        return outputs

    # The loop

    def has_unfinished_requests(self) -> bool:
        return self.core.has_unfinished

    def step(self) -> list[RequestOutput]:
        """Computes one step. Returns the requests that got something: whole texts so far, not deltas."""
        return [state.snapshot() for state in self.advance()]

    def advance(self) -> list[RequestState]:
        """As `step`, without the outputs' copies: for callers that need only some of them, before the next call."""
        self._check_open()
        touched: dict[str, RequestState] = {}
        for output in self.core.step():
            if state := self._states.get(output.request_id):
                touched[output.request_id] = state
                self._apply(state, output)
        for request_id, state in touched.items():
            if state.finished:
                del self._states[request_id]
        return list(touched.values())

    def _apply(self, state: RequestState, output: EngineOutput) -> None:
        try:
            if state.apply(output):
                self.core.finish(output.request_id, "stop", output.index)
        except Exception as error:
            # A renderer is a plugin: what it does wrong for one request ends that one.
            renderer = self.config.renderer.renderer
            state.end("error", f"renderer {renderer!r} failed on the output: {type(error).__name__}: {error}")
            self.core.finish(output.request_id, "error")

    def shutdown(self) -> None:
        """Releases the model and its memory. The engine cannot be used after it."""
        self._closed = True
        self.core.shutdown()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine has been shut down.")

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
