"""API keys: who a client is, and how much it may ask for."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct, field
from toolkit_lm.errors import ConfigError
from toolkit_lm.outputs import RequestOutput
from toolkit_lm.params import RequestOutputKind

from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.options import ServerOptions

Output = TypeVar("Output")
Limit = Annotated[int, Meta(ge=1)] | None


class ApiKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of --api-keys-file. A limit that is not given is none."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    """What logs, events and errors call it. The key itself is never told."""
    key: Annotated[str, Meta(min_length=1, max_length=1024, pattern=r"^[!-~]+$")]
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    """Of prompts and outputs. What a request takes is known when it has run: then it delays the
    next one."""
    max_sequences: Limit = None
    """Sequences at a time: prompts x n."""


class _File(Struct, forbid_unknown_fields=True):
    keys: Annotated[list[ApiKey], Meta(min_length=1)] = field(default_factory=list)


class _Bucket:
    """So much per minute; what is left of a minute is saved up, and debts are paid off first."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._most = per_minute
        self._level = float(per_minute)
        self._then = now

    def take(self, amount: int) -> None:
        self._level -= amount

    def wait(self, now: float) -> float:
        """Seconds until there is one in it."""
        self._level = min(self._most, self._level + (now - self._then) * self._most / 60)
        self._then = now
        return max(0.0, 1 - self._level) * 60 / self._most


class Account:
    """What a key has asked for."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self.name = key.name
        self._key = key
        self._clock = clock
        self._num_sequences = 0
        limits = {
            "requests_per_minute": key.requests_per_minute,
            "tokens_per_minute": key.tokens_per_minute,
        }
        self._buckets = {
            name: _Bucket(limit, clock()) for name, limit in limits.items() if limit is not None
        }

    def begin(self) -> None:
        """A request has come. Raises ApiError (429) where a minute's limit is met."""
        for name, bucket in self._buckets.items():
            if seconds := bucket.wait(self._clock()):
                self._refuse(name, getattr(self._key, name), seconds)
        self._take("requests_per_minute", 1)

    @contextmanager
    def run(self, num_sequences: int) -> Iterator[None]:
        """For the life of so many sequences.

        Raises ApiError: (400) for more than the key may ever have, (429) where they are too many
        beside the others.
        """
        most = self._key.max_sequences
        if most is not None and num_sequences > most:
            message = (
                f"The key {self.name!r} may have {most} sequences at a time (max_sequences), "
                f"and the request asks for {num_sequences}: prompts x n."
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
        """Counts the tokens of a request's output. `counted`: by request, what its outputs had so
        far."""
        tokens = sum(len(one.token_ids) for one in output.outputs)
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
        """`outputs`, whose tokens are counted. `each`: the outputs of requests in one of them."""
        counted: dict[str, int] = {}
        async with aclosing(outputs):
            async for output in outputs:
                for one in each(output):
                    self._count(one, counted, kind)
                yield output

    def used(self, num_tokens: int) -> None:
        """Tokens of prompts or outputs were computed."""
        self._take("tokens_per_minute", num_tokens)

    def _take(self, name: str, amount: int) -> None:
        if name in self._buckets:
            self._buckets[name].take(amount)

    def _refuse(self, name: str, limit: int, seconds: float) -> None:
        headers = {"Retry-After": str(int(seconds) + 1)}
        message = (
            f"The key {self.name!r} has met its limit: {name} is {limit}. Try again in "
            f"{int(seconds) + 1} s."
        )
        raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)


class Keys:
    """The keys that clients may send. Touched by the event loop only."""

    def __init__(self, keys: Sequence[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError where two have a name or a key in common."""
        self.accounts = {key.name: Account(key, clock) for key in keys}
        self.limited = any(
            (key.requests_per_minute, key.tokens_per_minute, key.max_sequences)
            != (None, None, None)
            for key in keys
        )
        """Some key has a limit."""
        # Digests are looked up: the time that this takes tells nothing of the keys.
        self._names = {_digest(key.key): key.name for key in keys}
        if len(self.accounts) < len(keys) or len(self._names) < len(keys):
            raise ConfigError("two API keys have the same name, or are the same.")

    @classmethod
    def of(cls, options: ServerOptions) -> Keys | None:
        """Those of the options; None where no client needs one. Raises ConfigError, which repeats
        no key."""
        if not options.needs_key:
            return None
        listed = [] if options.api_keys_file is None else cls._read(options.api_keys_file)
        own = [
            ApiKey(name="api_key" if number == 0 else f"api_key-{number + 1}", key=key)
            for number, key in enumerate(options.own_keys)
        ]
        return cls([*listed, *own])

    @staticmethod
    def _read(path: str) -> list[ApiKey]:
        try:
            return msgspec.yaml.decode(Path(path).read_bytes(), type=_File).keys
        except (OSError, msgspec.ValidationError) as error:
            raise ConfigError(f"option 'api_keys_file': {path!r}: {error}") from error
        except msgspec.DecodeError as error:
            # Its text would quote the line.
            raise ConfigError(f"option 'api_keys_file': {path!r} is not YAML.") from error

    def find(self, authorization: str) -> Account:
        """Whose request it is, by its header. Raises ApiError (401)."""
        scheme, _, given = authorization.partition(" ")
        name = self._names.get(_digest(given.strip())) if scheme.lower() == "bearer" else None
        if name is None:
            message = "Incorrect API key provided: send it as 'Authorization: Bearer KEY'."
            raise ApiError(
                401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        return self.accounts[name]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
