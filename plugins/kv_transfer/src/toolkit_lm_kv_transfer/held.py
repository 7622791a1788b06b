"""Held: blocks that wait for peers, in host memory. Needs no torch."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import count

from toolkit_lm_kv_transfer.arena import Arena
from toolkit_lm_kv_transfer.wire import ArenaName, Key

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Room:
    """Memory of a block."""

    data: bytearray | memoryview
    place: int | None = None
    """Its offset in the arena; None: no other process sees it."""


@dataclass(slots=True)
class _Entry:
    room: Room
    readers: int
    """Number of fetches that the block waits for."""
    end: float
    """time.monotonic() at which it is freed."""


@dataclass(slots=True)
class Loan:
    """A block that is read: its bytes, or the place where a peer finds them."""

    data: bytes | bytearray | memoryview
    place: int = -1
    """Its offset in the arena. -1: the bytes are to be sent."""
    number: int = 0
    """The peer gives it back by this number."""


class Held:
    """Blocks within a budget of bytes. A block is freed once it is read as many times as it was
    offered, when its lease ends, or where room is short: the one that was offered longest ago goes
    first. Places that are lent to peers stay until these give them back, or for a lease. Any thread
    may call any method."""

    def __init__(self, budget: int, lease: float) -> None:
        """`budget`: bytes. `lease`: seconds."""
        self._budget = budget
        self._lease = lease
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        """In the order in which their leases end."""
        self._arena: Arena | None = None
        try:
            self._arena = Arena(budget)
        except (OSError, AttributeError) as error:
            # A system without such files.
            logger.info("kv_transfer shares no memory with peers: %s", error)
        self._uses: Counter[int] = Counter()
        """Numbers of entries and loans at each place."""
        self._loans: dict[int, tuple[float, Room]] = {}
        """Loans by number, with the time.monotonic() of their end, in the order of their ends."""
        self._numbers = count(1)
        self._used = 0.0
        """time.monotonic() of the last block."""
        self.shares = False
        """Blocks are put where peers of this machine can read them."""
        self.num_bytes = 0
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    @property
    def arena(self) -> ArenaName | None:
        """The name by which peers of this machine open the arena. None: there is none."""
        return None if self._arena is None else self._arena.name

    def renew(self, key: Key, now: float) -> bool:
        """Offers a block once more. Returns whether it is held."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return False
            entry.readers += 1
            entry.end = now + self._lease
            self._entries.move_to_end(key)
            return True

    def make_room(self, num_bytes: int) -> Room | None:
        """Memory for a block, which `put` holds. None: the budget has no room."""
        with self._lock:
            while self.num_bytes + num_bytes > self._budget and self._entries:
                self._pop(next(iter(self._entries)))
                self.num_expired += 1
            if self.num_bytes + num_bytes > self._budget:
                self.num_expired += 1
                return None
            self.num_bytes += num_bytes
            if num_bytes and self.shares and self._arena is not None:
                place = self._arena.allocate(num_bytes)
                if place is not None:
                    self._uses[place] = 1
                    return Room(self._arena.at(place, num_bytes), place)
            return Room(bytearray(num_bytes))

    def put(self, key: Key, room: Room, now: float) -> None:
        """Holds a block."""
        with self._lock:
            self._pop(key)
            self._entries[key] = _Entry(room, 1, now + self._lease)
            self._used = now

    def free(self, room: Room) -> None:
        """Frees room that is not held."""
        with self._lock:
            self._free(room)

    def read(self, key: Key, now: float, *, lends: bool) -> Loan | None:
        """A block, which nobody writes any more; None: it is not held. `lends`: the reader sees
        the arena."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            room = entry.room
            if room.place is None:
                loan = Loan(room.data)
            elif lends:
                loan = Loan(room.data, room.place, next(self._numbers))
                self._uses[room.place] += 1
                self._loans[loan.number] = (now + self._lease, room)
                self.num_bytes += len(room.data)
            else:
                # The place may be another block's before the bytes are sent.
                loan = Loan(bytes(room.data))
            entry.readers -= 1
            if entry.readers <= 0:
                self._pop(key)
            return loan

    def give_back(self, number: int) -> None:
        """A peer has read what was lent to it. Unknown numbers are accepted."""
        with self._lock:
            if (loan := self._loans.pop(number, None)) is not None:
                self._free(loan[1])

    def drop(self, key: Key) -> None:
        """Frees a block. Unknown ones are accepted."""
        with self._lock:
            self._pop(key)

    def expire(self, now: float) -> None:
        """Frees the blocks whose lease has ended."""
        with self._lock:
            while self._loans:
                number, (end, room) = next(iter(self._loans.items()))
                if end > now:
                    break
                del self._loans[number]
                self._free(room)
            while self._entries:
                key, entry = next(iter(self._entries.items()))
                if entry.end > now:
                    return
                self._pop(key)
                self.num_expired += 1
            if self._arena is not None and now - self._used > self._lease:
                self._arena.trim()

    def close(self) -> None:
        """Frees all blocks."""
        with self._lock:
            self._entries.clear()
            self._loans.clear()
            self._uses.clear()
            self.num_bytes = 0
            self.shares = False
            if self._arena is not None:
                self._arena.close()
                self._arena = None

    def _pop(self, key: Key) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._free(entry.room)

    def _free(self, room: Room) -> None:
        """An entry or a loan has ended."""
        self.num_bytes -= len(room.data)
        if room.place is None:
            return
        self._uses[room.place] -= 1
        if not self._uses[room.place]:
            del self._uses[room.place]
            if self._arena is not None:
                self._arena.give_back(room.place, len(room.data))
