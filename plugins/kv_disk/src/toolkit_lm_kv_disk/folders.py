"""Folders of KV blocks: one per identity, with one per rank in it, and who may write to them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

_LOCK = "lock"


class Lock:
    """A lock of a folder, held until `close` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder where there is none. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd: int | None = os.open(
            folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Folders that were not used for long go first.
            os.utime(folder / _LOCK)
        except BlockingIOError:
            self.close()

    @property
    def is_held(self) -> bool:
        return self._fd is not None

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        self.close()


def folder_of(place: str, identity: bytes) -> Path:
    """The folder of an identity's blocks."""
    return Path(place).expanduser() / identity.hex()[:32]


def of_rank(folder: Path, rank: int) -> Path:
    """The folder of a rank's blocks."""
    return folder / f"rank-{rank}"


def is_own(path: Path) -> bool:
    """Whether a folder is one of an identity's."""
    name = path.name
    return len(name) == 32 and set(name) <= set("0123456789abcdef") and (path / _LOCK).is_file()


def num_bytes_of(folder: Path) -> int:
    """Bytes of a folder's files."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total


def make_room(place: str, own: Path, budget: int) -> int:
    """Deletes the folders of other identities, the longest unused first, until they have at most
    half of the budget. Returns what they leave of it. Those that an engine writes to stay."""
    others = []
    for path in Path(place).expanduser().iterdir():
        if path != own and is_own(path):
            with contextlib.suppress(OSError):
                others.append(((path / _LOCK).stat().st_mtime, path, num_bytes_of(path)))
    total = sum(size for _, _, size in others)
    for _, path, size in sorted(others):
        if total <= budget // 2:
            break
        with contextlib.suppress(OSError):
            lock = Lock(path)
            if lock.is_held:
                shutil.rmtree(path)
                total -= size
            lock.close()
    return max(budget - total, 0)
