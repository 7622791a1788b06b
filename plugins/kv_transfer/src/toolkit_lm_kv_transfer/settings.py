"""Settings of an engine: its address, its peers, the secret, and the sizes. Needs no torch."""

from __future__ import annotations

import hashlib
import os
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm_kv_tiers.limits import given_options, num_bytes
from toolkit_lm_kv_tiers.sealing import read_secret_file

SECRET = "TOOLKIT_LM_KV_TRANSFER_SECRET"  # nosec B105 # the variable's name
_ENGINE = "TOOLKIT_LM_ENGINE_NUMBER"
"""Variable of an engine's process: its number among several."""
_LEAST_SECRET = 16
"""Least characters of the secret."""
_MOST_SECRET = 4096
"""Most bytes that are read of the secret's file."""


class Address(NamedTuple):
    """An engine's address: that of its rank 0."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def plus(self, number: int) -> Address:
        """The address with a port that is `number` higher. Raises ValueError if there is none."""
        if self.port + number > 65535:
            raise ValueError(f"{self} leaves no port for {number + 1} ranks")
        return Address(self.host, self.port + number)

    @property
    def endpoint(self) -> str:
        """The address as ZeroMQ names it."""
        return f"tcp://{self}"


def parse(name: str, text: str) -> Address:
    """Parses HOST:PORT. Raises ValueError, which names the option."""
    try:
        parts = urlsplit(f"//{text}")
        host = parts.hostname
        port = parts.port
    except ValueError:
        host = None
        port = None
    if not host or not port or parts.netloc != text or "@" in text:
        raise ValueError(
            f"{name}: {text[:200]!r} is no HOST:PORT, such as 10.0.0.1:5600 or [fd00::1]:5600."
        )
    return Address(host, port)


def peers_of(options: Any) -> list[Address]:
    """The engines that blocks may be fetched of. Raises ValueError."""
    stated = options.peers
    items = stated.strip("[] ").split(",") if isinstance(stated, str) else stated
    texts = [text for item in items if (text := str(item).strip(" '\""))]
    return [parse("peers", text) for text in dict.fromkeys(texts)]


def memory_of(options: Any) -> int:
    """Most bytes of blocks that wait for peers. Raises ValueError."""
    return num_bytes("memory", options.memory)


def check_options(options: Any) -> None:
    """Raises ValueError for a value that is none, and for one that needs another."""
    peers = peers_of(options)
    memory_of(options)
    for name in ("listen", "advertise"):
        if (text := getattr(options, name)) is not None:
            parse(name, text)
    if options.advertise is not None and options.listen is None:
        raise ValueError("advertise: it is the name of an address, and listen states none.")
    if options.listen is not None and options.advertise is None:
        host = parse("listen", options.listen).host
        if host in ("0.0.0.0", "::", "*"):  # nosec B104 # it is compared
            raise ValueError(
                f"listen: peers cannot reach {host}. State in advertise how they reach this engine."
            )
    if len(peers) > 256:
        raise ValueError(f"peers: at most 256 engines, not {len(peers)}.")


def is_enabled(config: VllmConfig) -> bool:
    """Whether an option of the plugin asks for transfers."""
    options = given_options(config, "kv_transfer")
    return options.get("listen") is not None or bool(options.get("peers"))


def check(config: VllmConfig, options: Any) -> None:
    """Raises ConfigError for an engine that can transfer nothing."""
    if options.listen is None and not peers_of(options):
        return
    if config.cache.enable_prefix_caching is False:
        raise ConfigError("kv_transfer moves cached prefixes, and enable_prefix_caching is False.")
    if config.parallel.nodes > 1:
        raise ConfigError("kv_transfer: the ranks of an engine must be on one machine (nodes 1).")
    read_secret(options)


def read_secret(options: Any) -> bytes:
    """The key of the peers: the SHA-256 digest of the secret, which a file or the environment
    holds. Raises ConfigError."""
    if options.secret_file is None:
        where = f"the environment variable {SECRET}"
        secret = os.environ.get(SECRET, "").strip().encode()
        if not secret:
            raise ConfigError(
                "kv_transfer: peers need a secret that they share: state secret_file, or set "
                f"{SECRET}."
            )
    else:
        where = f"the file {options.secret_file!r} (kv_transfer.secret_file)"
        name = "kv_transfer.secret_file"
        secret = read_secret_file(name, options.secret_file, _MOST_SECRET).strip()
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(
            f"the secret in {where} has {len(secret)} characters: it needs {_LEAST_SECRET}. "
            "`openssl rand -hex 32` makes one."
        )
    return hashlib.sha256(secret).digest()


def first_port(config: VllmConfig, address: Address) -> Address:
    """The address of this engine's rank 0: engines of one server have ports side by side."""
    number = int(os.environ.get(_ENGINE, "0"))
    return address.plus(number * config.parallel.num_ranks)
