"""Arena: memory that a server shares with clients on the same machine. Needs no torch.

It is a file without a name: it ends with the last process that has it open, however that ends.
Processes of the same user open it through /proc. A client that cannot, since it runs on another
machine, as another user or in another PID namespace, fetches over TCP.
"""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import secrets
import stat

from toolkit_lm_kv_transfer.wire import ArenaName

_HEAD = mmap.PAGESIZE
"""Bytes before the first place: they begin with the token."""
_TOKEN = 32
"""Bytes of the token."""
_ALIGNMENT = 64


class Arena:
    """A server's end: hands out places. One thread at a time calls its methods."""

    def __init__(self, num_bytes: int) -> None:
        """Memory is used where something was written. Raises OSError."""
        self._size = _HEAD + _aligned(num_bytes)
        self._file = os.memfd_create("kv_transfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, self._size)
            # A file that cannot shrink kills no reader.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
            self._memory = mmap.mmap(self._file, self._size)
        except BaseException:
            os.close(self._file)
            raise
        token = secrets.token_bytes(_TOKEN)
        self._memory[:_TOKEN] = token
        self.name = ArenaName(os.getpid(), self._file, token)
        self._free: dict[int, list[int]] = {}
        """Places that were given back, by their size."""
        self._end = _HEAD
        """No place has been taken beyond."""
        self._touched = _HEAD
        """Nothing has been written beyond."""
        self.num_used = 0
        """Number of places that are taken."""

    def allocate(self, num_bytes: int) -> int | None:
        """A place of so many bytes, as its offset. None: there is no room."""
        size = _aligned(num_bytes)
        if free := self._free.get(size):
            place = free.pop()
        elif self._end + size <= self._size:
            place = self._end
            self._end += size
            self._touched = max(self._touched, self._end)
        else:
            return None
        self.num_used += 1
        return place

    def give_back(self, place: int, num_bytes: int) -> None:
        """Frees a place of so many bytes."""
        self._free.setdefault(_aligned(num_bytes), []).append(place)
        self.num_used -= 1
        if not self.num_used:
            # Places of other sizes may follow.
            self._free.clear()
            self._end = _HEAD

    def at(self, place: int, num_bytes: int) -> memoryview:
        """The bytes of a place."""
        return memoryview(self._memory)[place : place + num_bytes]

    def trim(self) -> None:
        """Gives the memory back to the system, if no place is taken."""
        if not self.num_used and self._touched > _HEAD:
            pages = -(-(self._touched - _HEAD) // mmap.PAGESIZE) * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_REMOVE, _HEAD, min(pages, self._size - _HEAD))
            self._touched = _HEAD

    def close(self) -> None:
        """Closes the file. The memory ends with its last user."""
        os.close(self._file)


class SharedMemory:
    """A client's end: reads places."""

    def __init__(self, name: ArenaName) -> None:
        """Raises OSError and ValueError where it cannot be shared."""
        path = f"/proc/{name.pid}/fd/{name.file}"
        # Nothing but a file is opened: opening has effects on devices.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(f"{path} is no file")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError(f"{path} may shrink")
            self._memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        if not hmac.compare_digest(self._memory[:_TOKEN], name.token):
            self._memory.close()
            raise ValueError(f"{path} is another arena")

    def read(self, place: int, num_bytes: int) -> bytes:
        """A copy of a place: the server may write to it again. It is shorter where the arena ends
        before."""
        return self._memory[place : place + num_bytes]

    def close(self) -> None:
        self._memory.close()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
