"""Where the tier is, and what is asked of it. Needs no torch, and no Redis."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm_kv_tiers.limits import given_options
from toolkit_lm_kv_tiers.sealing import check_key, read_secret_file

PASSWORD = "TOOLKIT_LM_KV_REDIS_PASSWORD"  # nosec B105
"""Variable of the environment that has the password."""
_SCHEMES = ("redis", "rediss", "unix")


class Address(NamedTuple):
    """Address of the server."""

    host: str
    port: int
    db: int
    username: str | None
    tls: bool
    socket: str | None
    """Path of a socket of this machine, instead of host and port."""

    def __str__(self) -> str:
        return self.socket or f"{self.host}:{self.port}/{self.db}"


def address_of(url: str) -> Address:
    """Reads a URL. Raises ValueError, without a password that it may hold."""
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError:
        raise ValueError("url: its host or port cannot be read") from None
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"url: it begins with none of {', '.join(f'{s}://' for s in _SCHEMES)}")
    if parts.password is not None:
        raise ValueError(
            f"url: it holds a password, which lists of processes show. Set {PASSWORD}, or "
            "password_file."
        )
    if parts.query or parts.fragment:
        raise ValueError("url: it takes no '?' and no '#'")
    username = unquote(parts.username) if parts.username else None
    path = unquote(parts.path)
    if parts.scheme == "unix":
        if not path or parts.hostname:
            raise ValueError("url: a socket is unix:///path/of/it")
        return Address("", 0, 0, username, tls=False, socket=path)
    number = path.strip("/")
    if not parts.hostname or (number and not number.isdecimal()):
        raise ValueError("url: it is like redis://HOST:PORT/DATABASE")
    tls = parts.scheme == "rediss"
    return Address(parts.hostname, port, int(number or 0), username, tls=tls, socket=None)


def password_of(options: Any) -> str | None:
    """The server's password. Raises ConfigError for a file that cannot be read."""
    if options.password_file is None:
        return os.environ.get(PASSWORD) or None
    text = read_secret_file("kv_redis.password_file", options.password_file, 4096)
    try:
        return text.partition(b"\n")[0].rstrip(b"\r").decode() or None
    except UnicodeDecodeError as error:
        raise ConfigError(f"kv_redis.password_file: {error}") from None


def is_enabled(config: VllmConfig) -> bool:
    """Whether an option of the plugin asks for the tier."""
    return given_options(config, "kv_redis").get("url") is not None


def key_file_of(config: VllmConfig, options: Any) -> str | None:
    """File with the key that blocks are encrypted with: the one of all tiers, by default."""
    found: str | None = options.key_file or given_options(config, "kv_disk").get("key_file")
    return found


def is_selective(config: VllmConfig, options: Any) -> bool:
    """Whether blocks are written that were seen twice alone: as all tiers, by default."""
    write = options.write or given_options(config, "kv_disk").get("write")
    return bool(write == "selective")


def _check_values(options: Any) -> None:
    """Raises ValueError for options that cannot be met."""
    address = address_of(options.url)
    if options.ca_file is not None and not address.tls:
        raise ValueError("ca_file: it is for servers with TLS, and url is not rediss://")
    if options.ttl < 0:
        raise ValueError(f"ttl: {options.ttl} is negative. 0 keeps blocks until others need room.")
    if not options.namespace or not options.namespace.isprintable() or " " in options.namespace:
        raise ValueError("namespace: it is empty, or has spaces or characters that are not printed")


def check(config: VllmConfig, options: Any) -> None:
    """Raises ConfigError where there are no cached prefixes to keep, and for files that cannot be
    read."""
    if options.url is None:
        return
    # Not in the options' constructor: its errors quote all options, and a password with them.
    try:
        _check_values(options)
    except ValueError as error:
        raise ConfigError(f"kv_redis.{error}") from None
    if config.cache.enable_prefix_caching is False:
        raise ConfigError(
            "kv_redis.url is a place for cached prefixes, and enable_prefix_caching is False."
        )
    password_of(options)
    if options.ca_file is not None and not Path(options.ca_file).expanduser().is_file():
        raise ConfigError(f"kv_redis.ca_file: there is no file {options.ca_file}.")
    if (key_file := key_file_of(config, options)) is not None:
        check_key(key_file)


def explain(config: VllmConfig, options: Any) -> Mapping[str, Sequence[str]]:
    """The tier, for `toolkit explain`."""
    kept = "until others need room" if options.ttl == 0 else f"for {options.ttl} s"
    sealed = "" if key_file_of(config, options) is None else ", encrypted"
    return {"KV tier in Redis": [f"{address_of(options.url)}: blocks stay {kept}{sealed}"]}
