"""Budgets that clients share: the memory of their requests, and places in the queue."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack, cast

from toolkit_lm.errors import QueueFullError, RequestError
from toolkit_lm.params import SamplingParams
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.prompts import listed

from toolkit_lm_serving import CLIENT
from toolkit_lm_serving.accounts import Account, Asked, counted
from toolkit_lm_serving.cost import (
    OPEN_END,
    Cost,
    generation_cost,
    pooling_cost,
    rendering_cost,
    tokens_of,
)

if TYPE_CHECKING:
    from toolkit_lm import AsyncLLM
    from toolkit_lm.config import Task, VllmConfig
    from toolkit_lm.engine import EngineState
    from toolkit_lm.frontend import EncodeOptions, Health
    from toolkit_lm.outputs import PoolingRequestOutput, RequestOutput
    from toolkit_lm.plugin import Plugins
    from toolkit_lm.processing import Processor, RequestOptions
    from toolkit_lm.prompts import Conversation, Prompt, TextPair
    from toolkit_lm.renderer import ConversationOptions, Renderer

    from toolkit_lm_serving.engine import Model

Output = TypeVar("Output")
Answer = TypeVar("Answer")

_REQUESTS = 3
"""Memory of all requests together, as a multiple of one request's limit."""
_SHORT = 64
"""Fewest places of a queue that clients share. A shorter one is not shared."""


class Shares:
    """An amount that clients share, such as memory. Each may take seven eighths of the rest, so
    that later clients find some. Thread-safe."""

    def __init__(self, most: int | None) -> None:
        """`most`: the amount. None: no bound."""
        self._most = most
        self._reserved: Counter[str] = Counter()
        """The amount that each client has reserved."""
        self._lock = threading.Lock()

    @property
    def reserved(self) -> int:
        """The amount that all clients together have reserved."""
        with self._lock:
            return self._reserved.total()

    @contextmanager
    def reserve(self, client: str, amount: int, shown: Callable[[int], str]) -> Iterator[None]:
        """Reserves an amount for a client, until the end of the `with` block.

        Raises RequestError for an amount that no client may have, QueueFullError where others leave
        too little. `shown`: formats an amount for the error.
        """
        if self._most is not None and amount > self._most * 7 // 8:
            raise RequestError(
                f"this takes {shown(amount)}, and no client may take more than "
                f"{shown(self._most * 7 // 8)}. Ask for less at a time."
            )
        with self._lock:
            own = self._reserved[client]
            reserved = self._reserved.total()
            if self._most is not None and own + amount > (self._most - (reserved - own)) * 7 // 8:
                owned = f", {shown(own)} of them this client's" if own < reserved else ""
                raise QueueFullError(
                    f"the engine is busy: {shown(reserved)} are taken{owned}. This takes "
                    f"{shown(amount)} more. Try again later.",
                    1.0,
                )
            self._reserved[client] = own + amount
        try:
            yield
        finally:
            with self._lock:
                self._reserved[client] -= amount
                if not self._reserved[client]:
                    del self._reserved[client]


def request_memory(most: int) -> Shares:
    """The memory of all requests together. `most`: bytes that one may cost."""
    return Shares(_REQUESTS * most)


class CostBudget:
    """Bounds the memory of each request, the memory of all together, and their number.
    Thread-safe."""

    def __init__(
        self, most: int, max_queued: int | None = None, memory: Shares | None = None
    ) -> None:
        """`most`: bytes that one request may cost. `max_queued`: requests that may wait. A short
        queue is not shared. `memory`: the memory of all requests, where other budgets share it."""
        self._most = most
        self._bytes = memory or request_memory(most)
        self._requests = Shares(None if max_queued is None or max_queued < _SHORT else max_queued)

    @property
    def num_requests(self) -> int:
        """Prompts and inputs that are under way or wait."""
        return self._requests.reserved

    @contextmanager
    def spend(self, cost: Cost, client: str = "", num_requests: int = 1) -> Iterator[None]:
        """Spends a request's cost, until the end of the `with` block. Raises RequestError for one
        that costs too much. Raises QueueFullError where the others leave too little."""
        total = sum(cost.values())
        if total > self._most:
            largest = sorted(cost.items(), key=lambda item: -item[1])[:2]
            factors = " and ".join(f"{name} ({_mib(size)})" for name, size in largest if size)
            raise RequestError(
                f"the request could take {_mib(total)} of memory, most of it for {factors}, and "
                f"may take {_mib(self._most)} (max_request_cost). Ask for less of it."
            )
        requests = self._requests.reserve(client, num_requests, "{:,} requests".format)
        with requests, self._bytes.reserve(client, total, lambda size: f"{_mib(size)} of memory"):
            yield


class BudgetedModel:
    """A model whose rendering is held to a budget (ServedModel)."""

    def __init__(self, model: Model, budget: CostBudget) -> None:
        self._model = model
        self._budget = budget

    @property
    def config(self) -> VllmConfig:
        return self._model.config

    @property
    def plugins(self) -> Plugins:
        return self._model.plugins

    @property
    def renderer(self) -> Renderer:
        return self._model.renderer

    @property
    def served_model_name(self) -> str:
        return self._model.served_model_name

    def hold(
        self, cost: Cost, options: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[None]:
        return self._budget.spend(cost, _client(options), 0)

    def hold_rendering(
        self, prompts: Sequence[object], options: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[None]:
        return self.hold(rendering_cost(prompts, self._measure, self._at_once), options)

    def _measure(
        self, part: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        return self.renderer.media_size(part, options)

    def _at_once(self, text: str) -> int:
        return self.renderer.tokenized_at_once(text)


class BudgetedLLM(BudgetedModel):
    """An AsyncLLM whose requests are held to a budget, and to the limits of their clients' keys
    (ServingEngine).

    All routes get it, those of plugins too.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        budget: CostBudget,
        accounts: Mapping[str, Account] | None = None,
        asked: Asked | None = None,
    ) -> None:
        """`accounts`: limits by client. `asked`: a function that is told of each request that
        generates."""
        super().__init__(engine, budget)
        self._engine = engine
        self._asked = asked
        self._accounts = accounts or {}

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

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        outputs = self._engine.generate(prompt, sampling_params, request_id, **options)
        return self._held([prompt], sampling_params, options, outputs, lambda output: [output])

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        options: RequestOptions | None = None,
        **render_options: Unpack[ConversationOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        outputs = self._engine.chat(
            messages, sampling_params, request_id, options=options, **render_options
        )
        prompts = [(messages, render_options)]
        return self._held(prompts, sampling_params, options, outputs, lambda output: [output])

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        outputs = self._engine.generate_many(prompts, sampling_params, **options)
        return self._held(prompts, sampling_params, options, outputs, _without_numbers)

    def chat_many(
        self,
        conversations: Sequence[Conversation],
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        **render_options: Unpack[ConversationOptions],
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        outputs = self._engine.chat_many(
            conversations, sampling_params, options=options, **render_options
        )
        prompts = [(messages, render_options) for messages in conversations]
        return self._held(prompts, sampling_params, options, outputs, _without_numbers)

    async def encode(
        self,
        prompt: Prompt | TextPair,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[EncodeOptions],
    ) -> PoolingRequestOutput:
        ids = None if request_id is None else [request_id]
        [output] = await self.encode_many([prompt], pooling_params, request_ids=ids, **options)
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
        many = listed(prompts)
        account = self._account(options)
        paid = self._budget.spend(self._pooling(many, pooling_params, options), _client(options))
        running = nullcontext() if account is None else account.run(len(many), tokens_of(many))
        with paid, running as reservation:
            outputs = await self._engine.encode_many(
                many, pooling_params, request_ids=request_ids, names=names, **options
            )
            if reservation is not None:
                reservation.used(sum(len(output.prompt_token_ids) for output in outputs))
        return outputs

    def _pooling(
        self,
        prompts: Sequence[object],
        params: PoolingParams | Sequence[PoolingParams] | None,
        how: Mapping[str, Any],
    ) -> Cost:
        each = (
            [params]
            if isinstance(params, PoolingParams)
            else params or [PoolingParams(task=how.get("pooling_task") or "embed")]
        )
        tasks = {request_params.task for request_params in each}
        limits = self._engine.processor.limits
        return pooling_cost(
            prompts,
            cut=how.get("truncate_prompt_tokens") is not None,
            size=max((limits.rules(task).size or 1 for task in tasks), default=1),
            per_token=any(task.startswith("token_") for task in tasks),
            max_model_len=self._engine.config.max_model_len,
            measure=self._measure,
            at_once=self._at_once,
        )

    def _account(self, options: Mapping[str, Any] | None) -> Account | None:
        """The account of a request's client, whom its context names."""
        return self._accounts.get(_client(options))

    def _held(
        self,
        prompts: Sequence[object],
        params: SamplingParams | None,
        options: Mapping[str, Any] | None,
        outputs: AsyncGenerator[Output, None],
        each: Callable[[Output], list[RequestOutput]],
    ) -> AsyncGenerator[Output, None]:
        """Passes `outputs` on, and holds their cost until their end. `each`: the requests' outputs
        in one item."""
        params = params or SamplingParams(**self._engine.config.sampling_defaults)
        account = self._account(options)
        max_model_len = self._engine.config.model.max_model_len
        assert max_model_len is not None, "the config is not resolved"
        with ExitStack() as paid:
            cost = generation_cost(prompts, params, max_model_len, self._measure, self._at_once)
            paid.enter_context(self._budget.spend(cost, _client(options), len(prompts)))
            if account is not None:
                num_sequences = len(prompts) * params.num_sequences
                num_tokens = tokens_of(prompts) + num_sequences * (params.max_tokens or OPEN_END)
                reservation = paid.enter_context(account.run(num_sequences, num_tokens))
                outputs = counted(outputs, params.output_kind, each, reservation)
            if self._asked is not None:
                self._asked(params.max_tokens, len(prompts))
            return cast(AsyncGenerator[Output, None], _Paid(outputs, paid.pop_all().close))


class _Paid(Generic[Output]):
    """Outputs whose cost is held until they are closed or collected as garbage."""

    def __init__(self, outputs: AsyncGenerator[Output, None], end: Callable[[], None]) -> None:
        self._outputs = outputs
        self._end = weakref.finalize(self, end)
        self._end.atexit = False

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[Output]:
        return self._outputs.__anext__()

    async def aclose(self) -> None:
        try:
            await self._outputs.aclose()
        finally:
            self._end()


def _client(options: Mapping[str, Any] | None) -> str:
    client: str = ((options or {}).get("context") or {}).get(CLIENT, "")
    return client


def _without_numbers(found: list[tuple[int, RequestOutput]]) -> list[RequestOutput]:
    return [output for _, output in found]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
