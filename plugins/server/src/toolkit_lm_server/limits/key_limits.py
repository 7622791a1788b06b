"""The limits of API keys: requests and tokens per minute, and sequences at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Annotated, TypeVar

from msgspec import Meta, Struct, structs
from toolkit_lm.outputs import RequestOutput
from toolkit_lm.params import RequestOutputKind

from toolkit_lm_server.errors import ApiError

Output = TypeVar("Output")
Limit = Annotated[int, Meta(ge=1)] | None
"""A limit of at least 1. None: no limit."""


class ApiKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of --api-keys-file. A limit of None does not apply."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    """The key's name in logs, events and errors. The key itself is never told."""
    key: Annotated[str, Meta(min_length=1, max_length=1024, pattern=r"^[!-~]+$")]
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    """Tokens of prompts and outputs per minute. A request's tokens are known when it has run, and
    delay the next one."""
    max_sequences: Limit = None
    """Sequences at a time, which are prompts x n."""
    adapters: tuple[Annotated[str, Meta(min_length=1, pattern=r"^[^\n]+$")], ...] | None = None
    """Patterns of the names of adapters that the key may see and use, as fnmatch has them. None:
    all."""
    models: tuple[Annotated[str, Meta(min_length=1, pattern=r"^[^\n]+$")], ...] | None = None
    """Patterns of the names of models, like those of adapters."""


class _Bucket:
    """A token bucket: an amount per minute. A minute's rest is saved up, and debts are paid off
    first."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._most = per_minute
        self._level = float(per_minute)
        self._then = now

    def charge(self, amount: int) -> None:
        self._level -= amount

    def wait(self, now: float) -> float:
        """Seconds until the next unit can be charged."""
        self._level = min(self._most, self._level + (now - self._then) * self._most / 60)
        self._then = now
        return max(0.0, 1 - self._level) * 60 / self._most


class Account:
    """The requests, tokens and sequences of one API key, held to the key's limits."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self.name = key.name
        self._clock = clock
        self._num_sequences = 0
        self._buckets: dict[str, _Bucket] = {}
        self._set(key)

    def _set(self, key: ApiKey) -> None:
        self._key = key
        self.adapters = key.adapters
        """Patterns as in ApiKey, as those of `models` are."""
        self.models = key.models
        limits = {
            "requests_per_minute": key.requests_per_minute,
            "tokens_per_minute": key.tokens_per_minute,
        }
        self._buckets = {
            name: _Bucket(limit, self._clock())
            for name, limit in limits.items()
            if limit is not None
        }

    def change(self, key: ApiKey) -> None:
        """Gives the key other limits. Its sequences go on, and what it has used of a minute
        counts only where the limits stay as they are."""
        if structs.replace(key, key=self._key.key) != self._key:
            self._set(key)
        self._key = key

    def begin(self) -> None:
        """Counts a request. Raises ApiError (429) where a minute's limit is met."""
        for name, bucket in self._buckets.items():
            if seconds := bucket.wait(self._clock()):
                self._refuse(name, getattr(self._key, name), seconds)
        self._charge("requests_per_minute", 1)

    @contextmanager
    def run(self, num_sequences: int) -> Iterator[None]:
        """Counts sequences as running, until the end of the `with` block.

        Raises ApiError: (400) for more than the key may ever have, (429) where they are too many
        beside the others.
        """
        most = self._key.max_sequences
        if most is not None and num_sequences > most:
            message = (
                f"The key {self.name!r} may have {most} sequences at a time (max_sequences), "
                f"and the request asks for {num_sequences}: prompts x n. Split it."
            )
            raise ApiError(400, message, code="rate_limit_exceeded")
        if most is not None and self._num_sequences + num_sequences > most:
            self._refuse("max_sequences", most, 1.0)
        self._num_sequences += num_sequences
        try:
            yield
        finally:
            self._num_sequences -= num_sequences

    def _count(
        self, output: RequestOutput, counted: dict[str, int], kind: RequestOutputKind
    ) -> None:
        """Counts the tokens of a request's output. `counted`: tokens counted so far, by request."""
        tokens = sum(len(sequence.token_ids) for sequence in output.outputs)
        before = counted.get(output.request_id)
        if before is None:
            self.used(output.num_prompt_tokens)
        self.used(tokens if kind is RequestOutputKind.DELTA else tokens - (before or 0))
        counted[output.request_id] = tokens

    async def counted(
        self,
        outputs: AsyncGenerator[Output, None],
        kind: RequestOutputKind,
        each: Callable[[Output], list[RequestOutput]],
    ) -> AsyncGenerator[Output, None]:
        """Passes `outputs` on, and counts their tokens. `each`: the requests' outputs in one
        item."""
        counted: dict[str, int] = {}
        async with aclosing(outputs):
            async for batch in outputs:
                for output in each(batch):
                    self._count(output, counted, kind)
                yield batch

    def used(self, num_tokens: int) -> None:
        """Counts tokens of prompts or outputs that were computed."""
        self._charge("tokens_per_minute", num_tokens)

    def _charge(self, name: str, amount: int) -> None:
        if name in self._buckets:
            self._buckets[name].charge(amount)

    def _refuse(self, name: str, limit: int, seconds: float) -> None:
        headers = {"Retry-After": str(int(seconds) + 1)}
        message = (
            f"The key {self.name!r} has met its limit: {name} is {limit}. Try again in "
            f"{int(seconds) + 1} s."
        )
        raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)
