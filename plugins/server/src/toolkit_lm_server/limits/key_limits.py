"""The limits of API keys: requests and tokens per minute, and sequences at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from toolkit_lm_server.errors import ApiError

Limit = Annotated[int, Meta(ge=1)] | None
"""A limit of at least 1. None: no limit."""


class ApiKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of --api-keys-file. A limit of None does not apply."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    """The key's name in logs, events and errors. The key itself is never told."""
    key: Annotated[str, Meta(min_length=1, max_length=1024, pattern=r"^[!-~]+$")]
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    """Tokens of prompts and outputs per minute. A request reserves what it may take, and gives back
    what it has not taken."""
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

    def wait(self, now: float, amount: int = 1) -> float:
        """Seconds until `amount`, or a whole minute's, can be charged."""
        self._level = min(self._most, self._level + (now - self._then) * self._most / 60)
        self._then = now
        return max(0.0, min(amount, self._most) - self._level) * 60 / self._most


class _Reservation:
    """Tokens that a request has reserved. Those that it takes beyond them are charged as they
    come."""

    def __init__(
        self, bucket: _Bucket | None, num_tokens: int, lock: AbstractContextManager[Any]
    ) -> None:
        """`lock`: the account's"""
        self._lock = lock
        self._bucket = bucket
        self._charged = 0
        self._used = 0
        self._charge(num_tokens)

    def _charge(self, num_tokens: int) -> None:
        self._charged += num_tokens
        if self._bucket is not None:
            self._bucket.charge(num_tokens)

    def used(self, num_tokens: int) -> None:
        with self._lock:
            self._used += num_tokens
            self._charge(max(0, self._used - self._charged))

    def end(self) -> None:
        """Gives back what was not taken."""
        with self._lock:
            self._charge(self._used - self._charged)


class Account:
    """The requests, tokens and sequences of one API key, held to the key's limits. Thread-safe: a
    large request is counted in a thread."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self.name = key.name
        self._clock = clock
        self._num_sequences = 0
        self._lock = threading.RLock()
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
        with self._lock:
            if structs.replace(key, key=self._key.key) != self._key:
                self._set(key)
            self._key = key

    def begin(self) -> None:
        """Counts a request. Raises ApiError (429) where a minute's limit is met."""
        with self._lock:
            for name, bucket in self._buckets.items():
                if seconds := bucket.wait(self._clock()):
                    self._refuse(name, getattr(self._key, name), seconds)
            self._charge("requests_per_minute", 1)

    @contextmanager
    def run(self, num_sequences: int, num_tokens: int) -> Iterator[_Reservation]:
        """Counts sequences as running, and reserves tokens, until the end of the `with` block.

        Raises ApiError: (400) for more sequences than the key may ever have, (429) where they are
        too many beside the others, or the tokens are more than a minute has left.
        """
        with self._lock:
            reservation = self._reserve(num_sequences, num_tokens)
        try:
            yield reservation
        finally:
            with self._lock:
                self._num_sequences -= num_sequences
                reservation.end()

    def _reserve(self, num_sequences: int, num_tokens: int) -> _Reservation:
        most = self._key.max_sequences
        if most is not None and num_sequences > most:
            message = (
                f"The key {self.name!r} may have {most} sequences at a time (max_sequences), "
                f"and the request asks for {num_sequences}: prompts x n. Split it."
            )
            raise ApiError(400, message, code="rate_limit_exceeded")
        if most is not None and self._num_sequences + num_sequences > most:
            self._refuse("max_sequences", most, 1.0)
        bucket = self._buckets.get("tokens_per_minute")
        if bucket is not None and (seconds := bucket.wait(self._clock(), num_tokens)):
            needs = f" The request may take {num_tokens} tokens."
            self._refuse("tokens_per_minute", self._key.tokens_per_minute or 0, seconds, needs)
        self._num_sequences += num_sequences
        return _Reservation(bucket, num_tokens, self._lock)

    def _charge(self, name: str, amount: int) -> None:
        if name in self._buckets:
            self._buckets[name].charge(amount)

    def _refuse(self, name: str, limit: int, seconds: float, needs: str = "") -> None:
        headers = {"Retry-After": str(int(seconds) + 1)}
        message = (
            f"The key {self.name!r} has met its limit: {name} is {limit}.{needs} Try again in "
            f"{int(seconds) + 1} s."
        )
        raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)
