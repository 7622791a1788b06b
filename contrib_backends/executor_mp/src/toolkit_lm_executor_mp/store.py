"""Stores of torch.distributed, by which the ranks of a process group find each other.

A process group keeps the part of a store that is in C++ alone: whoever makes one holds the store as
long as the group.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

from toolkit_lm_executor_mp.socket_group import TIMEOUT, LostRankError

_dist: Any = torch.distributed
"""torch.distributed as Any: its type stubs cover only a part of it."""
_DIGEST = hashlib.sha256().digest_size
_NONCE = 16
"""Random bytes in each value. They tell a rank's own value from an equal one of another rank."""


class SignedStore(_dist.Store):  # type: ignore[misc]
    """A store whose values are signed with an HMAC of key and value. A value that no rank has
    signed is an error.

    The wrapped store accepts anybody's keys. Only the methods that process groups use exist here.
    """

    def __init__(self, store: Any, key: bytes) -> None:
        super().__init__()
        self._store = store
        self._key = key

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(
            key, self._seal(key, value.encode() if isinstance(value, str) else bytes(value))
        )

    def get(self, key: str) -> bytes:
        """Waits for the key and returns its value. Raises LostRankError if no rank has signed
        it."""
        return self._open(key, self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        """Adds `amount` to a number, which starts at 0, and returns the sum. Raises LostRankError
        if no rank has signed the number."""
        while True:
            before = bytes(self._store.get(key)) if self._store.check([key]) else b""
            number = amount + (int(self._open(key, before)) if before else 0)
            after = self._seal(key, b"%d" % number)
            # Where another rank was faster, it is that one's value.
            if bytes(self._store.compare_set(key, before, after)) == after:
                return number

    def check(self, keys: list[str]) -> bool:
        """Whether ranks have set all of the keys."""
        try:
            return bool(self._store.check(keys)) and all(self.get(key) is not None for key in keys)
        except LostRankError:
            return False

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=TIMEOUT)) -> None:
        self._store.wait(keys, timeout)

    def clone(self) -> SignedStore:
        """This store itself. A clone of a TCPStore would reconnect, which is impossible once the
        ranks are connected."""
        return self

    def _seal(self, key: str, value: bytes) -> bytes:
        sealed = secrets.token_bytes(_NONCE) + value
        return self._sign(key, sealed) + sealed

    def _open(self, key: str, signed: Any) -> bytes:
        digest = bytes(signed)[:_DIGEST]
        sealed = bytes(signed)[_DIGEST:]
        if not hmac.compare_digest(digest, self._sign(key, sealed)):
            raise LostRankError(
                f"the store of the ranks holds a value of {key!r} that no rank of this launch "
                "has put there"
            )
        return sealed[_NONCE:]

    def _sign(self, key: str, value: bytes) -> bytes:
        # The length ends the key: no other pair has the same bytes.
        return hmac.digest(self._key, f"{len(key)} {key}".encode() + value, "sha256")


class _OpenFile:
    """A file descriptor that is closed with its last reference."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class OpenFileStore(_dist.FileStore):  # type: ignore[misc]
    """A FileStore whose file may be deleted once all ranks have opened it. Linux only, since it
    needs /proc/self/fd."""

    def __init__(self, path: Path) -> None:
        """Opens the file. Makes it if it does not exist."""
        # It is closed after the store's part in C++ has gone, which writes to it at its end.
        self._file = _OpenFile(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        super().__init__(f"/proc/self/fd/{self._file.descriptor}")
        self.set_timeout(timedelta(seconds=TIMEOUT))
