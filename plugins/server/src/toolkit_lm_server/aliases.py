"""Further names of a served model: the engine with something more, such as an adapter. Plugins'
routes add them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, Unpack

from toolkit_lm_serving.engine import ServingEngine

from toolkit_lm_server.caller import CALLER

if TYPE_CHECKING:
    from toolkit_lm.config import Task, VllmConfig
    from toolkit_lm.engine import EngineState
    from toolkit_lm.frontend import EncodeOptions, Health
    from toolkit_lm.outputs import PoolingRequestOutput, RequestOutput
    from toolkit_lm.params import SamplingParams
    from toolkit_lm.plugin import Plugins
    from toolkit_lm.pooling_params import PoolingParams
    from toolkit_lm.processing import Processor, RequestOptions
    from toolkit_lm.prompts import Conversation, Prompt, TextPair
    from toolkit_lm.renderer import ConversationOptions, Renderer
    from toolkit_lm_serving.cost import Cost

Answer = TypeVar("Answer")


class Alias(NamedTuple):
    """Meaning of a name, beside the model."""

    root: str | None
    """Where it is from, as /v1/models shows it. None: that is not known before a request is
    prepared, which may find that there is no such name."""
    context: Mapping[str, str]
    """Added to the context of each request, where a part reads it."""


class AliasSource(Protocol):
    """Names that a plugin brings. They may change at any time."""

    def find(self, name: str) -> Alias | None:
        """What a name stands for; None: it is unknown."""

    def names(self) -> Iterable[str]:
        """The names that /v1/models lists."""


class Aliases:
    """The sources of names. Each caller has those that its key may use."""

    def __init__(self) -> None:
        self._sources: list[AliasSource] = []

    def add(self, source: AliasSource) -> None:
        """Adds a source, after the ones that there are."""
        self._sources.append(source)

    def find(self, name: str) -> Alias | None:
        """The alias that the first source has that knows the name."""
        if not CALLER.get().may_use(name):
            return None
        found = (source.find(name) for source in self._sources)
        return next((alias for alias in found if alias is not None), None)

    def names(self) -> list[str]:
        may_use = CALLER.get().may_use
        return [name for source in self._sources for name in source.names() if may_use(name)]


class AliasEngine:
    """An engine under another name: its requests have the alias's context."""

    def __init__(self, engine: ServingEngine, name: str, alias: Alias) -> None:
        self._engine = engine
        self.served_model_name = name
        self._context = alias.context

    @property
    def config(self) -> VllmConfig:
        return self._engine.config

    @property
    def plugins(self) -> Plugins:
        return self._engine.plugins

    @property
    def renderer(self) -> Renderer:
        return self._engine.renderer

    @property
    def processor(self) -> Processor:
        return self._engine.processor

    @property
    def tasks(self) -> tuple[Task, ...]:
        return self._engine.tasks

    @property
    def error(self) -> BaseException | None:
        return self._engine.error

    @property
    def engines(self) -> Sequence[EngineState]:
        return self._engine.engines

    @property
    def num_queued_tokens(self) -> int:
        return self._engine.num_queued_tokens

    @property
    def num_restarts(self) -> int:
        return self._engine.num_restarts

    def hold(
        self, cost: Cost, options: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[None]:
        return self._engine.hold(cost, options)

    def hold_rendering(
        self, prompts: Sequence[object], options: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[None]:
        return self._engine.hold_rendering(prompts, options)

    def health(self) -> Health:
        return self._engine.health()

    async def wait_ready(self) -> None:
        await self._engine.wait_ready()

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def reset_prefix_cache(self) -> None:
        await self._engine.reset_prefix_cache()

    async def call_workers(
        self, method: str, payload: object = None, answer: type[Answer] | None = None
    ) -> list[Answer]:
        return await self._engine.call_workers(method, payload, answer)

    def _with(self, options: Mapping[str, Any] | None) -> Any:
        named = options or {}
        return {**named, "context": {**named.get("context", {}), **self._context}}

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        return self._engine.generate(prompt, sampling_params, request_id, **self._with(options))

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        return self._engine.generate_many(prompts, sampling_params, **self._with(options))

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        options: RequestOptions | None = None,
        **render_options: Unpack[ConversationOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        return self._engine.chat(
            messages, sampling_params, request_id, options=self._with(options), **render_options
        )

    def chat_many(
        self,
        conversations: Sequence[Conversation],
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        **render_options: Unpack[ConversationOptions],
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        return self._engine.chat_many(
            conversations, sampling_params, options=self._with(options), **render_options
        )

    async def encode(
        self,
        prompt: Prompt | TextPair,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[EncodeOptions],
    ) -> PoolingRequestOutput:
        return await self._engine.encode(prompt, pooling_params, request_id, **self._with(options))

    async def encode_many(
        self,
        prompts: Prompt | TextPair | Sequence[Prompt | TextPair],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        **options: Unpack[EncodeOptions],
    ) -> list[PoolingRequestOutput]:
        return await self._engine.encode_many(
            prompts, pooling_params, request_ids=request_ids, names=names, **self._with(options)
        )


Under = Callable[[Any, str, Alias], Any]
"""What a name has, made of what the default model has."""


def engine_under(engine: ServingEngine, name: str, alias: Alias) -> ServingEngine:
    """The engine as requests with that name of an alias get it."""
    return AliasEngine(engine, name, alias)
