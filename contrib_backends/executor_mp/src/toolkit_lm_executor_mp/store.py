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
"""Its types know but a part of it."""
_DIGEST = hashlib.sha256().digest_size
_NONCE = 16
"""Bytes of chance in each value: who has put it there can tell it from an equal one."""


class SignedStore(_dist.Store):  # type: ignore[misc]
    """A store of values with an HMAC of their keys and of themselves: what others than ranks have
    put there is an error.

    The store itself takes anybody's keys. Only those methods are here that process groups use.
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
        """Waits until it is there. Raises LostRankError where no rank has put it there."""
        return self._open(key, self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, which is 0 at first, and returns it. Raises LostRankError where no rank
        has put it there."""
        while True:
            before = bytes(self._store.get(key)) if self._store.check([key]) else b""
            number = amount + (int(self._open(key, before)) if before else 0)
            after = self._seal(key, b"%d" % number)
            # Where another rank was faster, it is that one's value.
            if bytes(self._store.compare_set(key, before, after)) == after:
                return number

    def check(self, keys: list[str]) -> bool:
        """Whether ranks have put all of them there."""
        try:
            return bool(self._store.check(keys)) and all(self.get(key) is not None for key in keys)
        except LostRankError:
            return False

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=TIMEOUT)) -> None:
        self._store.wait(keys, timeout)

    def clone(self) -> SignedStore:
        """This one: that of a TCPStore connects anew, which nobody can once the ranks are
        connected."""
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
    """A descriptor that is closed with its last holder."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class OpenFileStore(_dist.FileStore):  # type: ignore[misc]
    """A store in a file that may be deleted once all ranks have opened it. Linux alone has paths of
    open files."""

    def __init__(self, path: Path) -> None:
        """Makes the file where it is not there."""
        # It is closed after the store's part in C++ has gone, which writes to it at its end.
        self._file = _OpenFile(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        super().__init__(f"/proc/self/fd/{self._file.descriptor}")
        self.set_timeout(timedelta(seconds=TIMEOUT))
