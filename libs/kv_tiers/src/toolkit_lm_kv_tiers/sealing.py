"""Seals: encryption of blocks at rest, and names of blocks that tell nothing. Needs no torch.

Data are sealed with AES-256-GCM, a random nonce of 96 bits each, and with the place and the name of
the block as associated data. Its key is derived from the key of the file and from the identity of
the blocks, so that each identity may have 2**32 blocks (NIST SP 800-38D, 8.3). Names are keyed
BLAKE2b of digests.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from pathlib import Path

from toolkit_lm.errors import ConfigError
from toolkit_lm.kv import Data

from toolkit_lm_kv_tiers.pricing import Key

logger = logging.getLogger(__name__)

KEY_BYTES = 32
_NONCE = 12
_TAG = 16


class SealError(Exception):
    """Data were sealed with another key, for another place, or are damaged."""


class Seal:
    """Leaves names and data as they are: without a key."""

    overhead = 0
    """Bytes of sealed data beside those of the data."""

    def __init__(self, identity: bytes) -> None:
        """`identity`: of all blocks, 32 bytes."""
        self.identity = identity
        """The identity by which a place is named."""

    def name(self, digest: bytes) -> bytes:
        """Returns the name of a block, 32 bytes as its digest."""
        return digest

    def about(self, rank: int, block: Key) -> bytes:
        """Returns what tells a rank's block, by its group and name, from all others."""
        group, name = block
        return self.identity + rank.to_bytes(4, "little") + group.to_bytes(2, "little") + name

    def close(self, data: bytes | bytearray, about: bytes) -> bytes | bytearray:
        """Returns sealed data. `about`: what tells their place and their block from others."""
        return data

    def open(self, data: Data, about: bytes) -> Data:
        """Returns the data. Raises SealError."""
        return data


class KeyedSeal(Seal):
    """Names and data are of a key."""

    overhead = _NONCE + _TAG

    def __init__(self, identity: bytes, key: bytes) -> None:
        """Raises ConfigError without the package `cryptography`."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigError(
                "key_file: encrypted KV blocks need the package `cryptography`: "
                "pip install cryptography"
            ) from None
        super().__init__(hmac.digest(key, b"toolkit-lm identity" + identity, "sha256"))
        self._invalid = InvalidTag
        self._names = hmac.digest(key, b"toolkit-lm names" + identity, "sha256")
        self._cipher = AESGCM(hmac.digest(key, b"toolkit-lm blocks" + identity, "sha256"))

    def name(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, digest_size=32, key=self._names).digest()

    def close(self, data: bytes | bytearray, about: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher.encrypt(nonce, data, about)

    def open(self, data: Data, about: bytes) -> Data:
        view = memoryview(data)
        try:
            return self._cipher.decrypt(view[:_NONCE], view[_NONCE:], about)
        except (self._invalid, ValueError):
            raise SealError("the block is of another key or place, or damaged") from None


def make_seal(identity: bytes, key_file: str | None) -> Seal:
    """The seal with the key of a file; None: none. Raises ConfigError."""
    return Seal(identity) if key_file is None else KeyedSeal(identity, read_key(key_file))


def check_key(key_file: str) -> None:
    """Raises ConfigError where blocks cannot be sealed with the key of a file. Warns where others
    than its owner may read it."""
    KeyedSeal(bytes(32), read_key(key_file))
    path = Path(key_file).expanduser()
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning("%s: others than its owner may use this key: chmod 600", path)


def read_key(key_file: str) -> bytes:
    """Reads a key of 32 bytes. Raises ConfigError."""
    key = read_secret_file("key_file", key_file, KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        size = "more" if len(key) > KEY_BYTES else f"{len(key)}"
        raise ConfigError(
            f"key_file: {key_file} has {size} bytes, and a key has {KEY_BYTES}, such as from "
            f"`head -c {KEY_BYTES} /dev/urandom`."
        )
    return key


def read_secret_file(option: str, name: str, most: int) -> bytes:
    """Reads a file's first bytes, at most `most`. Raises ConfigError, which names the option."""
    path = Path(name).expanduser()
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}") from None
