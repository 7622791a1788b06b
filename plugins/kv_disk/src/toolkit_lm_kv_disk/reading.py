"""BlockReader: reads blocks behind the steps. Needs no torch."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
from toolkit_lm.kv import Data

from toolkit_lm_kv_disk.segments import RECORD_BYTES, Key, Place

_THREADS = 2
_RUN = 2**21
"""Most bytes that are read in one call, but for a greater block."""
_MOST_ROOM = 2**23
"""Most bytes of a room: memory that is kept for later blocks. Memory that is used for the first
time costs several times as much as reading into it."""
_MOST_SPARE = 2**26
"""Most bytes of all rooms."""
_READY = 2**23
"""Bytes of the rooms that are made, and written to, before anything is read."""
_PATIENCE = 0.001
"""Seconds that a thread waits for memory to come back before it takes more."""


class _Wanted(NamedTuple):
    name: Key
    place: Place
    future: Future[Data]


class BlockReader:
    """Threads that read blocks. Blocks that follow one another in a file are read in one call, into
    memory that comes back once nobody has its bytes any more."""

    def __init__(self, open_: Callable[[Key, memoryview], Data], largest: int) -> None:
        """`open_` makes a block of its stored bytes, or raises. `largest`: bytes of the largest
        stored block."""
        self._open = open_
        self._room_bytes = max(_RUN, min(largest, _MOST_ROOM))
        self._spare: deque[bytearray] = deque()
        """Memory that nobody uses. A finalizer may add to it at any moment: no lock is taken."""
        self._num_rooms = 0
        self._queue: deque[_Wanted] = deque()
        self._changed = threading.Condition()
        self._ends = False
        self._threads = [
            threading.Thread(target=self._read_all, name="kv_disk read", daemon=True)
            for _ in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, name: Key, place: Place) -> Future[Data]:
        """A future of a block. It fails with OSError, DamageError, or what `open_` raises."""
        future: Future[Data] = Future()
        with self._changed:
            self._queue.append(_Wanted(name, place, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Ends the threads. What was not read is cancelled."""
        with self._changed:
            self._ends = True
            for wanted in self._queue:
                wanted.future.cancel()
            self._queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _read_all(self) -> None:
        while (room := self._new_room(_READY)) is not None:
            np.frombuffer(room, np.uint8).fill(1)
            self._spare.append(room)
        while True:
            with self._changed:
                while not self._queue:
                    if self._ends:
                        return
                    self._changed.wait()
                run = self._next_run()
            self._read(run)
            # Its futures hold memory.
            del run

    def _next_run(self) -> list[_Wanted]:
        """Takes blocks that lie side by side off the queue, as many as fit into a room."""
        run = [self._queue.popleft()]
        first = run[0].place
        end = first.end
        while (
            self._queue
            and (place := self._queue[0].place).segment is first.segment
            and place.offset == end + RECORD_BYTES
            and place.end - first.offset <= _RUN
        ):
            run.append(self._queue.popleft())
            end = place.end
        return run

    def _read(self, run: list[_Wanted]) -> None:
        first = run[0].place
        try:
            view = self._lend(run[-1].place.end - first.offset)
            count = first.segment.read_into(view, first.offset)
        except Exception as error:
            for wanted in run:
                wanted.future.set_exception(error.with_traceback(None))
            return
        for name, place, future in run:
            start = place.offset - first.offset
            data = view[start : max(min(start + place.num_bytes, count), start)]
            try:
                place.check(data)
                found = self._open(name, data)
            except Exception as error:
                # Frames would hold the memory.
                future.set_exception(error.with_traceback(None))
            else:
                future.set_result(found)

    def _lend(self, size: int) -> memoryview:
        """Memory of so many bytes. A room comes back by itself once no view of it is left."""
        if size > self._room_bytes:
            return memoryview(bytearray(size))
        if not self._spare:
            time.sleep(_PATIENCE)
        try:
            room = self._spare.pop()
        except IndexError:
            if (new := self._new_room(_MOST_SPARE)) is None:
                return memoryview(bytearray(size))
            room = new
        lent = np.frombuffer(room, np.uint8)
        weakref.finalize(lent, self._spare.append, room).atexit = False
        return lent.data[:size]

    def _new_room(self, most: int) -> bytearray | None:
        """A new room; None: there are as many as have `most` bytes."""
        with self._changed:
            if (self._num_rooms + 1) * self._room_bytes > most:
                return None
            self._num_rooms += 1
        return bytearray(self._room_bytes)
