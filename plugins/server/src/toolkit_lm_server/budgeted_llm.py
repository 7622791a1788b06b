"""BudgetedLLM: an engine whose requests are held to what they may cost, and to what clients may."""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from toolkit_lm.params import SamplingParams
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.prompts import listed
from toolkit_lm_serving import CLIENT
from toolkit_lm_serving.budget import CostBudget
from toolkit_lm_serving.cost import Cost, generation_cost, pooling_cost, rendering_cost

from toolkit_lm_server.keys import Account, Keys

if TYPE_CHECKING:
    from toolkit_lm import AsyncLLM
    from toolkit_lm.outputs import PoolingRequestOutput, RequestOutput
    from toolkit_lm.prompts import Conversation, Prompt, TextPair

    from toolkit_lm_server.metrics import Metrics

Output = TypeVar("Output")

HoldRendering = Callable[[Sequence[object], Mapping[str, Any]], AbstractContextManager[None]]
"""BudgetedLLM.hold_rendering."""


class BudgetedLLM:
    """An AsyncLLM whose requests are held to a budget, and to the limits of their clients' keys.

    All routes get it, those of plugins too.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        budget: CostBudget,
        keys: Keys | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._engine = engine
        self._budget = budget
        self._metrics = metrics
        self._accounts: Mapping[str, Account] = {} if keys is None else keys.accounts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def hold(
        self, cost: Cost, options: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[None]:
        """What a route itself takes of memory, beside the requests that it makes. Raises
        RequestError, QueueFullError on entry."""
        return self._budget.spend(cost, _client(options), 0)

    def hold_rendering(
        self, prompts: Sequence[object], options: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """What it takes to render prompts, or conversations with their options, on a route that
        makes no request of them."""
        return self._budget.spend(
            rendering_cost(prompts, self._measure, self._at_once), _client(options), 0
        )

    def _measure(
        self, part: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        return self._engine.renderer.media_size(part, options)

    def _at_once(self, text: str) -> int:
        return self._engine.renderer.tokenized_at_once(text)

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        outputs = self._engine.generate(prompt, params, **options)
        return self._held([prompt], params, options, outputs, lambda output: [output])

    def chat(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        outputs = self._engine.chat(messages, params, **options)
        return self._held(
            [(messages, options)], params, options.get("options"), outputs, lambda output: [output]
        )

    def generate_many(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        outputs = self._engine.generate_many(prompts, params, **options)
        return self._held(prompts, params, options, outputs, _without_numbers)

    def chat_many(
        self,
        conversations: Sequence[Conversation],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        outputs = self._engine.chat_many(conversations, params, **options)
        prompts = [(messages, options) for messages in conversations]
        return self._held(prompts, params, options.get("options"), outputs, _without_numbers)

    async def encode(
        self, prompt: Prompt | TextPair, params: PoolingParams | None = None, **how: Any
    ) -> PoolingRequestOutput:
        [output] = await self.encode_many([prompt], params, **how)
        return output

    async def encode_many(
        self,
        prompts: Any,
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        **how: Any,
    ) -> list[PoolingRequestOutput]:
        many = listed(prompts)
        account = self._account(how)
        paid = self._budget.spend(self._pooling(many, params, how), _client(how))
        with paid, nullcontext() if account is None else account.run(len(many)):
            outputs = await self._engine.encode_many(many, params, **how)
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
            if self._metrics is not None:
                self._metrics.asked(params.max_tokens, len(prompts))
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
