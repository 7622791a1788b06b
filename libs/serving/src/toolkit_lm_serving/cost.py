"""What a request can come to cost: an upper bound, told before any work is done for it."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from toolkit_lm.errors import QueueFullError, RequestError
from toolkit_lm.params import SamplingParams
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.prompts import listed

from toolkit_lm_serving import CLIENT
from toolkit_lm_serving.accounts import Account, Asked
from toolkit_lm_serving.media_cost import Measure, is_item, items_of, media_cost

if TYPE_CHECKING:
    from toolkit_lm import AsyncLLM
    from toolkit_lm.outputs import PoolingRequestOutput, RequestOutput
    from toolkit_lm.prompts import Conversation, Prompt, TextPair

Output = TypeVar("Output")

HoldRendering = Callable[[Sequence[object], Mapping[str, Any]], AbstractContextManager[None]]
"""BudgetedLLM.hold_rendering."""
Cost = Mapping[str, int]
"""Bytes of memory in front and engine together, by what asks for them."""
AtOnce = Callable[[str], int]
"""Renderer.tokenized_at_once."""

_CHARACTER = 24
"""Bytes of memory for each byte of a text, in UTF-8, or token id, while it is read, checked and
rendered."""
_TOKENIZING = 160
"""Bytes more for each that is tokenized at a time, where each is a token: what the package
tokenizers keeps of them."""
_AT_A_TIME = 2**19
"""Bytes of short texts, or pieces of long ones, that are tokenized together."""
_SEQUENCE = 4096
_LOGPROB = 256
_NUMBER = 40
"""Bytes of memory for a number of a result."""
_ENTRY = 40
"""Bytes of memory for an entry of a list: a token id, say."""
_MESSAGE = 64
"""Bytes that a message of a conversation counts as, beside its own: it is read, checked and copied
for the template."""
_MEDIA = "images and other media"
_REQUESTS = 3
"""So many times the cost that one request may have is what all of them together may."""
_SHORT = 64
"""A queue of fewer requests is not shared."""


def generation_cost(
    prompts: Sequence[object],
    params: SamplingParams,
    max_model_len: int,
    measure: Measure | None = None,
    at_once: AtOnce | None = None,
) -> Cost:
    """Of prompts that generate, in one call.

    `measure`: tells what items of media take. `at_once`: how much of a text is tokenized at a time;
    None: all.
    """
    sizes = [_size(prompt) for prompt in prompts]
    of_prompts = sum(sizes)
    name, width = params.widest
    sequences = len(prompts) * width
    most = max_model_len if params.max_tokens is None else min(params.max_tokens, max_model_len)
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    words = sum(map(len, params.bad_words or ())) + len(repr(params.of_processors))
    # The best of several are chosen by the log probabilities of their tokens.
    ranked = 0 if params.ranks and params.num_logprobs is None else params.num_logprobs
    entries = _entries(ranked) + len(params.logprob_token_ids or ())
    return {
        _MEDIA: sum(media_cost(prompt, measure) for prompt in prompts if _may_hold_media(prompt)),
        "prompt": of_prompts * (_CHARACTER + _ENTRY * width) + _tokenizing(prompts, sizes, at_once),
        f"prompts x {name}": sequences * _SEQUENCE,
        f"prompts x {name} x max_tokens": sequences * most * _ENTRY,
        f"prompts x {name} x max_tokens x logprobs": sequences * most * entries * _LOGPROB,
        "prompt x prompt_logprobs": min(of_prompts, len(prompts) * max_model_len)
        * _entries(params.prompt_logprobs)
        * _LOGPROB,
        f"prompts x {name} x stop": sum(map(len, stops)) * 4 + sequences * len(stops) * 8,
        "prompts x bad_words": len(prompts) * words * 2 * _ENTRY,
        "prompts x allowed_token_ids": len(prompts)
        * len(params.allowed_token_ids or ())
        * 2
        * _ENTRY,
        "prompts x logit_bias": len(prompts) * len(params.logit_bias or ()) * 4 * _ENTRY,
    }


def rendering_cost(
    prompts: Sequence[object], measure: Measure | None = None, at_once: AtOnce | None = None
) -> Cost:
    """Of prompts, or conversations with their options, that are rendered only: side by side."""
    sizes = [_size(prompt) for prompt in prompts]
    tokenizing = sum(
        _tokenizing([one], [size], at_once) for one, size in zip(prompts, sizes, strict=True)
    )
    return {
        _MEDIA: sum(media_cost(prompt, measure) for prompt in prompts if _may_hold_media(prompt)),
        "prompt": sum(sizes) * (_CHARACTER + _ENTRY) + tokenizing,
    }


def pooling_cost(
    prompts: Sequence[object],
    *,
    cut: bool,
    size: int,
    per_token: bool,
    max_model_len: int,
    at_once: AtOnce | None = None,
) -> Cost:
    """Of prompts that are pooled, in one call.

    `cut`: they are cut to max_model_len at most. `size`: numbers of a result, or, with `per_token`,
    of each token's.
    """
    distinct = {
        id(text): text
        for prompt in prompts
        for text in (prompt if isinstance(prompt, tuple) else (prompt,))
    }
    sizes = [_size(text) for text in distinct.values()]
    lengths = [min(length, max_model_len) if cut else length for length in map(_size, prompts)]
    vectors = sum(min(length, max_model_len) for length in lengths) if per_token else len(prompts)
    return {
        "text": sum(sizes) * (_CHARACTER + _ENTRY)
        + _tokenizing(list(distinct.values()), sizes, at_once),
        "inputs x text": len(prompts) * _SEQUENCE + sum(lengths) * _ENTRY,
        "inputs x result": vectors * size * _NUMBER,
    }


def _entries(asked: int | None) -> int:
    """Log probabilities of one token: its own, and those of the likeliest."""
    return 0 if asked is None else asked + 1


def _tokenizing(given: Sequence[object], sizes: Sequence[int], at_once: AtOnce | None) -> int:
    """Bytes of memory that it takes to tokenize prompts one after the other. Token ids take
    nothing."""
    texts = [(one, size) for one, size in zip(given, sizes, strict=True) if not _is_tokens(one)]
    longest = max((_longest(one, size, at_once) for one, size in texts), default=0)
    return min(sum(size for _, size in texts), max(_AT_A_TIME, longest)) * _TOKENIZING


def _longest(given: object, size: int, at_once: AtOnce | None) -> int:
    """Bytes of a prompt of this size that are tokenized at a time."""
    if at_once is None or size <= _AT_A_TIME:
        return size
    # A template writes a conversation in its own way: where its text is cut depends on all that is
    # in it.
    texts = list(_texts(given))
    whole = sum(map(_utf8, texts))
    return min(size, max(0, size - whole) + sum(map(at_once, texts)))


def _texts(given: object) -> Iterator[str]:
    """The prompt, or both sides of it."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, tuple):
        for one in given:
            yield from _texts(one)
    elif isinstance(given, Mapping):
        for name in ("prompt", "encoder_prompt", "decoder_prompt"):
            yield from _texts(given.get(name))


def _is_tokens(given: object) -> bool:
    if isinstance(given, Mapping):
        return given.get("prompt_token_ids") is not None
    return isinstance(given, list) and (not given or isinstance(given[0], int))


def _utf8(text: str) -> int:
    """Bytes of a text. A tokenizer may make a token of each."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _size(given: object) -> int:
    """Bytes of a text, or token ids, about."""
    if isinstance(given, tuple):
        return sum(map(_size, given))
    if isinstance(given, Mapping) and "encoder_prompt" in given:
        return _size(given["encoder_prompt"]) + _size(given.get("decoder_prompt") or "")
    if isinstance(given, Mapping) and given.get("prompt_token_ids") is not None:
        given = given["prompt_token_ids"]
    elif isinstance(given, Mapping) and isinstance(given.get("prompt"), str):
        given = given["prompt"]
    if isinstance(given, list) and given and isinstance(given[0], dict):
        return sum(map(_message_size, given))
    if isinstance(given, str):
        return _utf8(given)
    return len(given) if isinstance(given, list) else _utf8(repr(given))


def _may_hold_media(given: object) -> bool:
    """It is a mapping, or a conversation with content in parts."""
    if isinstance(given, tuple) and given and isinstance(given[0], list):
        return any(map(_has_parts, given[0]))
    return isinstance(given, Mapping)


def _has_parts(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("content"), list)


def _message_size(message: object) -> int:
    """As `_size`, without items of media, which may be files of megabytes."""
    if not _has_parts(message) or not any(True for _ in items_of(message)):
        return _utf8(repr(message)) + _MESSAGE
    assert isinstance(message, Mapping)
    texts = [part for part in message["content"] if not is_item(part)]
    return _utf8(repr({**message, "content": texts})) + _MESSAGE * len(message["content"])


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


class BudgetedLLM:
    """An AsyncLLM whose requests are held to a budget, and to the limits of their clients' keys.

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
        self._engine = engine
        self._budget = budget
        self._asked = asked
        self._accounts = accounts or {}

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
