"""What clients share: the memory that their requests take, and places in the queue."""

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
from toolkit_lm_serving.accounts import Account, Asked
from toolkit_lm_serving.cost import Cost, generation_cost, pooling_cost, rendering_cost

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

_REQUESTS = 3
"""All requests together may cost this many times one request's limit."""
_SHORT = 64
"""A queue of fewer requests is not shared."""


class Shares:
    """What clients share. Each may take seven eighths of what the others leave, so that who comes
    later finds some. Thread-safe."""

    def __init__(self, most: int | None) -> None:
        """None: there is no bound."""
        self._most = most
        self._taken: Counter[str] = Counter()
        """By client."""
        self._lock = threading.Lock()

    @property
    def taken(self) -> int:
        """By all of them."""
        with self._lock:
            return self._taken.total()

    @contextmanager
    def take(self, client: str, amount: int, told: Callable[[int], str]) -> Iterator[None]:
        """Raises QueueFullError where that is too much beside the others, RequestError where it is
        too much alone.

        `told`: formats an amount for the error.
        """
        if self._most is not None and amount > self._most * 7 // 8:
            raise RequestError(
                f"this takes {told(amount)}, and no client may take more than "
                f"{told(self._most * 7 // 8)}."
            )
        with self._lock:
            own = self._taken[client]
            taken = self._taken.total()
            if self._most is not None and own + amount > (self._most - (taken - own)) * 7 // 8:
                whose = f", {told(own)} of them this client's" if own < taken else ""
                raise QueueFullError(
                    f"the engine is busy: {told(taken)} are taken{whose}. This takes "
                    f"{told(amount)} more. Try again later.",
                    1.0,
                )
            self._taken[client] = own + amount
        try:
            yield
        finally:
            with self._lock:
                self._taken[client] -= amount
                if not self._taken[client]:
                    del self._taken[client]


class CostBudget:
    """What the requests under way may cost, each and together, and how many there may be.
    Thread-safe."""

    def __init__(self, most: int, max_queued: int | None = None) -> None:
        """`most`: bytes that one request may cost. `max_queued`: requests that may wait; a short
        queue is not shared."""
        self._most = most
        self._bytes = Shares(_REQUESTS * most)
        self._requests = Shares(None if max_queued is None or max_queued < _SHORT else max_queued)

    @property
    def num_requests(self) -> int:
        """Prompts and inputs that are under way or wait."""
        return self._requests.taken

    @contextmanager
    def spend(self, cost: Cost, client: str = "", num_requests: int = 1) -> Iterator[None]:
        """Raises RequestError for what is too much, QueueFullError for what is too much beside the
        others."""
        total = sum(cost.values())
        if total > self._most:
            largest = sorted(cost.items(), key=lambda item: -item[1])[:2]
            told = " and ".join(f"{name} ({_mib(size)})" for name, size in largest if size)
            limit = f"max_request_cost is {_mib(self._most)}"
            raise RequestError(
                f"the request could take {_mib(total)} of memory, most of it for {told}; {limit}."
            )
        requests = self._requests.take(client, num_requests, "{:,} requests".format)
        with requests, self._bytes.take(client, total, lambda size: f"{_mib(size)} of memory"):
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
        """`accounts`: by client. `asked`: is told of each request that generates."""
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
        with paid, nullcontext() if account is None else account.run(len(many)):
            outputs = await self._engine.encode_many(
                many, pooling_params, request_ids=request_ids, names=names, **options
            )
        if account is not None:
            account.used(sum(len(output.prompt_token_ids) for output in outputs))
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
        tasks = {one.task for one in each}
        limits = self._engine.processor.limits
        return pooling_cost(
            prompts,
            cut=how.get("truncate_prompt_tokens") is not None,
            size=max((limits.rules(task).size or 1 for task in tasks), default=1),
            per_token=any(task.startswith("token_") for task in tasks),
            max_model_len=self._engine.config.max_model_len,
            at_once=self._at_once,
        )

    def _account(self, options: Mapping[str, Any] | None) -> Account | None:
        """Whose request it is: what routes pass on as its context says so."""
        return self._accounts.get(_client(options))

    def _held(
        self,
        prompts: Sequence[object],
        params: SamplingParams | None,
        options: Mapping[str, Any] | None,
        outputs: AsyncGenerator[Output, None],
        each: Callable[[Output], list[RequestOutput]],
    ) -> AsyncGenerator[Output, None]:
        """`outputs`, paid for until their end. `each`: the outputs of requests in one of them."""
        params = params or SamplingParams(**self._engine.config.sampling_defaults)
        account = self._account(options)
        max_model_len = self._engine.config.model.max_model_len
        assert max_model_len is not None, "the config is not resolved"
        with ExitStack() as paid:
            cost = generation_cost(prompts, params, max_model_len, self._measure, self._at_once)
            paid.enter_context(self._budget.spend(cost, _client(options), len(prompts)))
            if account is not None:
                paid.enter_context(account.run(len(prompts) * params.num_sequences))
                outputs = account.counted(outputs, params.output_kind, each)
            if self._asked is not None:
                self._asked(params.max_tokens, len(prompts))
            return cast(AsyncGenerator[Output, None], _Paid(outputs, paid.pop_all().close))


class _Paid(Generic[Output]):
    """Outputs, which are paid for until they are closed, or nobody has them any more."""

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
