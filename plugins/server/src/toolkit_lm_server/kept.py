"""Values that clients leave with the server: the latest, in memory, each known to its owner."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, Protocol, TypeVar

MOST_BYTES = 2**28
"""Most bytes of all values of a kind."""


class Sized(Protocol):
    @property
    def size(self) -> int:
        """Bytes of memory."""
        ...


SizedT = TypeVar("SizedT", bound=Sized)


class Kept(Generic[SizedT]):
    """The latest values, by owner and name.

    Where there is no more room, the client with the most gives up its oldest. So no client pushes
    out what others keep. Threads may share it.
    """

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        """`most`: the number of values to keep. 0 keeps none."""
        self._most = most
        self._most_bytes = most_bytes
        self._sizes: Counter[str] = Counter()
        """Bytes that are kept, by owner."""
        self._kept: dict[str, OrderedDict[str, SizedT]] = {}
        """Values by owner, then by name, the oldest first."""
        self._lock = Lock()

    @property
    def is_on(self) -> bool:
        return self._most > 0

    def add(self, name: str, value: SizedT, owner: str) -> None:
        """Keeps a value, in place of one with the same name."""
        with self._lock:
            self._add(name, value, owner)

    def change(self, name: str, owner: str, changed: Callable[[SizedT], SizedT]) -> SizedT | None:
        """Keeps what `changed` makes of a value, and returns it. None where the owner has no such
        value. Raises the errors of `changed`."""
        with self._lock:
            if (value := self.find(name, owner)) is None:
                return None
            value = changed(value)
            self._add(name, value, owner)
        return value

    def _add(self, name: str, value: SizedT, owner: str) -> None:
        if self.find(name, owner) is not None:
            self._drop(owner, name)
        self._kept.setdefault(owner, OrderedDict())[name] = value
        self._sizes[owner] += value.size
        while sum(map(len, self._kept.values())) > self._most:
            self._drop(max(self._kept, key=lambda each: len(self._kept[each])))
        while self._sizes.total() > self._most_bytes:
            self._drop(max(self._kept, key=self._sizes.__getitem__))

    def _drop(self, owner: str, name: str | None = None) -> None:
        """Forgets a value of an owner. `name` None: the oldest one."""
        kept = self._kept[owner]
        value = kept.popitem(last=False)[1] if name is None else kept.pop(name)
        self._sizes[owner] -= value.size
        if not kept:
            del self._kept[owner], self._sizes[owner]

    def find(self, name: str, owner: str) -> SizedT | None:
        """The value of this name, for its owner alone. Others do not learn that it exists."""
        return self._kept[owner].get(name) if owner in self._kept else None

    def of(self, owner: str) -> list[SizedT]:
        """An owner's values, the oldest first."""
        with self._lock:
            return [*self._kept.get(owner, {}).values()]

    def remove(self, name: str, owner: str) -> bool:
        """Forgets a value. Returns whether the owner had it."""
        with self._lock:
            is_kept = self.find(name, owner) is not None
            if is_kept:
                self._drop(owner, name)
        return is_kept
