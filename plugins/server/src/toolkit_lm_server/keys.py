"""API keys, which tell which client sends a request. Their limits are in `limits.key_limits`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field
from toolkit_lm.errors import ConfigError, in_plain_words

from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.limits.key_limits import Account, ApiKey
from toolkit_lm_server.options import ServerOptions


class _File(Struct, forbid_unknown_fields=True):
    keys: Annotated[list[ApiKey], Meta(min_length=1)] = field(default_factory=list)


class Keys:
    """The keys that clients may send. Only the event loop uses it."""

    def __init__(self, keys: Sequence[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError where two entries share a name or a key."""
        self._clock = clock
        self.accounts: dict[str, Account] = {}
        """Name of a key -> its account."""
        self.replace(keys)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Puts other keys in the place of all. A key that keeps its name keeps its account.

        Raises ConfigError where two entries share a name or a key. Then nothing has changed.
        """
        # Digests are looked up: the time that this takes tells nothing of the keys.
        names = {_digest(key.key): key.name for key in keys}
        if len({key.name for key in keys}) < len(keys) or len(names) < len(keys):
            raise ConfigError("two API keys have the same name, or are the same.")
        for name in set(self.accounts) - {key.name for key in keys}:
            del self.accounts[name]
        for key in keys:
            if key.name in self.accounts:
                self.accounts[key.name].change(key)
            else:
                self.accounts[key.name] = Account(key, self._clock)
        self._names = names
        self.limited = any(
            (key.requests_per_minute, key.tokens_per_minute, key.max_sequences)
            != (None, None, None)
            for key in keys
        )
        """At least one key has a limit."""

    @classmethod
    def of(cls, options: ServerOptions) -> Keys | None:
        """The keys of the options. None where no client needs one. Raises ConfigError, which
        repeats no key."""
        return cls(keys_of(options)) if options.needs_key else None

    def find(self, authorization: str) -> Account:
        """The account of a request, by its Authorization header. Raises ApiError (401)."""
        scheme, _, key = authorization.partition(" ")
        name = self._names.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        return self._account(name)

    def of_name(self, name: str | None) -> Account:
        """The account of the key of that name. Raises ApiError (401) where there is none any
        more."""
        return self._account(name if name in self.accounts else None)

    def _account(self, name: str | None) -> Account:
        if name is None:
            message = "Incorrect API key provided: send it as 'Authorization: Bearer KEY'."
            raise ApiError(
                401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        return self.accounts[name]


def keys_of(options: ServerOptions) -> list[ApiKey]:
    """All keys that the options name, read anew. Raises ConfigError, which repeats no key."""
    listed = [] if options.api_keys_file is None else _read(options.api_keys_file)
    own = [
        ApiKey(name="api_key" if number == 0 else f"api_key-{number + 1}", key=key)
        for number, key in enumerate(options.own_keys)
    ]
    return [*listed, *own]


def _read(path: str) -> list[ApiKey]:
    try:
        return msgspec.yaml.decode(Path(path).read_bytes(), type=_File).keys
    except OSError as error:
        raise ConfigError(f"api_keys_file: {path!r}: {error}") from error
    except msgspec.ValidationError as error:
        wrong = in_plain_words(error, f"api_keys_file: {path!r}: ", "what it holds")
        raise ConfigError(wrong) from error
    except msgspec.DecodeError as error:
        # Its text would quote the line.
        raise ConfigError(f"api_keys_file: {path!r} is not YAML.") from error


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
