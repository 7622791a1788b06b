"""Protocols of an engine as servers use it: its model, and the memory of its requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

Answer = TypeVar("Answer")


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


class Model(Protocol):
    """A model with its renderer, whether an engine computes it here or elsewhere."""

    @property
    def config(self) -> VllmConfig:
        """The resolved config."""

    @property
    def plugins(self) -> Plugins: ...

    @property
    def renderer(self) -> Renderer: ...

    @property
    def served_model_name(self) -> str:
        """The first name of the model."""


class ServedModel(Model, Protocol):
    """A model whose rendering is held to the server's budget."""

    def hold(
        self, cost: Cost, options: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[None]:
        """Holds memory that a route itself takes, beside the requests that it makes.

        `options`: the request's. Their context names the client. Raises RequestError and
        QueueFullError on entry.
        """

    def hold_rendering(
        self, prompts: Sequence[object], options: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[None]:
        """Holds the memory that rendering takes, on a route that makes no request. `prompts` may
        hold pairs of a conversation and its options.

        `options`: the request's. Their context names the client. Raises RequestError and
        QueueFullError on entry.
        """


class ServingEngine(ServedModel, Protocol):
    """The engine of one served model, as routes get it. It is an AsyncLLM whose requests are held
    to the server's budget, and to the limits of clients' keys.

    Methods are AsyncLLM's. Only its owner closes it.
    """

    @property
    def processor(self) -> Processor:
        """Makes requests from prompts. Its methods take a while, and must not run on the event
        loop."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that the model serves, once the engine is ready."""

    @property
    def error(self) -> BaseException | None:
        """The error that ended the engine, or kept it from starting. None while it lives."""

    @property
    def engines(self) -> Sequence[EngineState]:
        """The state of each engine, where there are several."""

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of the requests that wait for a place in the batch."""

    @property
    def num_restarts(self) -> int:
        """Number of times that a dead engine process was started anew."""

    def health(self) -> Health: ...

    async def wait_ready(self) -> None: ...

    async def abort(self, request_id: str) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    async def call_workers(
        self, method: str, payload: object = None, answer: type[Answer] | None = None
    ) -> list[Answer]: ...

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]: ...

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]: ...

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        options: RequestOptions | None = None,
        **render_options: Unpack[ConversationOptions],
    ) -> AsyncGenerator[RequestOutput, None]: ...

    def chat_many(
        self,
        conversations: Sequence[Conversation],
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        **render_options: Unpack[ConversationOptions],
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]: ...

    async def encode(
        self,
        prompt: Prompt | TextPair,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[EncodeOptions],
    ) -> PoolingRequestOutput: ...

    async def encode_many(
        self,
        prompts: Prompt | TextPair | Sequence[Prompt | TextPair],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        **options: Unpack[EncodeOptions],
    ) -> list[PoolingRequestOutput]: ...
