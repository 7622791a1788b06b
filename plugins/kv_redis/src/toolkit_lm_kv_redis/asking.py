"""Asker: asks the server which blocks it has, beside the steps. Needs no torch."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from toolkit_lm_kv_redis.link import Breaker, connect, key_of

if TYPE_CHECKING:
    from redis import Redis

Key = tuple[int, bytes]
"""KV group and name of a block."""

_PATIENCE = 0.1
"""Most seconds that a request waits for an answer."""
_SILENCE = 0.5
"""Most seconds that the server may be silent."""
_PRESENT = 30.0
_ABSENT = 1.0
"""Seconds for which an answer holds."""
_MOST = 2**18
"""Most answers that are remembered, of each kind. The oldest are forgotten."""
_AT_ONCE = 1024
"""Keys of a question."""


class Asker:
    """Remembers for a while what the server has answered, and what was given to it. All of its
    methods may be called while its thread asks."""

    def __init__(
        self, options: Any, prefix: str, num_ranks: int, name: Callable[[bytes], bytes]
    ) -> None:
        """`prefix`: of all keys. `name`: the name of a digest's block. Waits a moment for the
        server's first answer. Raises ConfigError."""
        self._client: Redis = connect(options, _SILENCE)
        self._prefix = prefix
        self._num_ranks = num_ranks
        self._name = name
        self._breaker = Breaker(f"{options.url}: no KV blocks are found there")
        self._changed = threading.Condition()
        self._present: OrderedDict[Key, float] = OrderedDict()
        self._absent: OrderedDict[Key, float] = OrderedDict()
        """Blocks by digest, each with the time of the answer."""
        self._asked: dict[Key, float] = {}
        """Blocks that are asked about, each with the time of the first question."""
        self._questions: list[Key] = []
        self._is_up = False
        self._resets = False
        self._ends = False
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv_redis ask", daemon=True)
        self._thread.start()
        self._has_begun.wait(2 * _SILENCE)

    @property
    def is_up(self) -> bool:
        """Whether the server answers, and is not being emptied."""
        return self._is_up and not self._resets

    @property
    def num_present(self) -> int:
        """Number of blocks that the server is known to have."""
        return len(self._present)

    def find(self, group: int, digests: Sequence[bytes]) -> tuple[int, bool]:
        """Returns how many blocks the server has, up to the first that it lacks, and whether it is
        still asked about some of these."""
        if not self.is_up:
            return 0, False
        now = time.monotonic()
        count = 0
        is_asking = False
        with self._changed:
            for digest in digests:
                key = (group, digest)
                if now - self._present.get(key, -_PRESENT) < _PRESENT:
                    count += not is_asking
                    continue
                if now - self._absent.get(key, -_ABSENT) < _ABSENT:
                    break
                if key not in self._asked:
                    self._asked[key] = now
                    self._questions.append(key)
                if now - self._asked[key] >= _PATIENCE:
                    break
                is_asking = True
            if is_asking:
                self._changed.notify()
        return (0 if is_asking else count), is_asking

    def is_known(self, key: Key) -> bool:
        """Whether the server is known to have a block."""
        return time.monotonic() - self._present.get(key, -_PRESENT) < _PRESENT

    def add(self, keys: Sequence[Key]) -> None:
        """These blocks are given to the server."""
        with self._changed:
            for key in keys:
                self._remember(key, is_there=True)

    def forget(self, keys: Sequence[Key]) -> None:
        """These blocks may not be there."""
        with self._changed:
            for key in keys:
                self._present.pop(key, None)

    def reset(self) -> list[Key]:
        """Deletes all blocks of the identity. Until that is done, nothing is found. Returns those
        that are known."""
        with self._changed:
            known = list(self._present)
            self._present.clear()
            self._resets = True
            self._changed.notify()
        return known

    def close(self) -> None:
        """Ends the thread, which is not waited for."""
        with self._changed:
            self._ends = True
            self._changed.notify()

    def _remember(self, key: Key, *, is_there: bool) -> None:
        kept = self._present if is_there else self._absent
        (self._absent if is_there else self._present).pop(key, None)
        kept[key] = time.monotonic()
        kept.move_to_end(key)
        if len(kept) > _MOST:
            kept.popitem(last=False)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._is_up and not (self._questions or self._resets or self._ends):
                    self._changed.wait()
                if not self._is_up and self._breaker.is_open and not self._ends:
                    self._changed.wait(self._breaker.wait)
                if self._ends:
                    break
                questions, self._questions = self._questions[:_AT_ONCE], self._questions[_AT_ONCE:]
            if self._is_up or not self._breaker.is_open:
                self._turn(questions)
        self._client.close()

    def _turn(self, questions: list[Key]) -> None:
        """Asks once; without a question, whether the server answers at all."""
        try:
            if self._resets and self._is_up:
                self._delete_all()
            found = self._ask(questions)
        # A server that is none may answer anything.
        except Exception as error:
            self._is_up = False
            self._breaker.failed(error)
            with self._changed:
                # Whatever else is asked has no answer either.
                self._questions.clear()
                self._asked.clear()
                self._present.clear()
        else:
            self._is_up = True
            self._breaker.worked()
            with self._changed:
                for key, is_there in found.items():
                    self._asked.pop(key, None)
                    self._remember(key, is_there=is_there)
        self._has_begun.set()

    def _ask(self, questions: list[Key]) -> dict[Key, bool]:
        """Returns whether all ranks' shares of each block are there. Raises what redis raises, and
        ValueError for answers that are none."""
        with self._client.pipeline(transaction=False) as pipe:
            for group, digest in questions:
                name = self._name(digest)
                for rank in range(self._num_ranks):
                    pipe.exists(key_of(self._prefix, rank, group, name))
            if not questions:
                pipe.exists(self._prefix)
            answers = pipe.execute()
        if not all(answer in (0, 1) for answer in answers):
            raise ValueError("it has answered other than 0 or 1")
        ranks = self._num_ranks
        return {key: all(answers[i * ranks : (i + 1) * ranks]) for i, key in enumerate(questions)}

    def _delete_all(self) -> None:
        pattern = "".join(f"\\{c}" if c in "*?[]\\^" else c for c in self._prefix) + "*"
        for keys in _in_parts(self._client.scan_iter(match=pattern, count=1000)):
            self._client.unlink(*keys)
        with self._changed:
            self._resets = False


def _in_parts(keys: Iterable[Any]) -> Iterator[list[Any]]:
    part: list[Any] = []
    for key in keys:
        part.append(key)
        if len(part) == _AT_ONCE:
            yield part
            part = []
    if part:
        yield part
