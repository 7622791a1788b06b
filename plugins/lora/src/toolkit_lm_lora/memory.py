"""The adapters in a worker's memory: which are read, kept and dropped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from toolkit_lm.errors import ToolkitError

from toolkit_lm_lora.share import Counts
from toolkit_lm_lora.weights import Adapter

logger = logging.getLogger(__name__)


class Memory:
    """Adapters by their digests. They are read in a thread of their own; all else is called in the
    thread of steps."""

    def __init__(self, read: Callable[[str, str], Adapter], options: Any, *, counts: bool) -> None:
        """`read`: reads an adapter, by its digest and its folder. `options`: the plugin's.
        `counts`: the worker is the first of its engine's."""
        self._read_folder = read
        self._options = options
        self._counts = counts
        self.pool = ThreadPoolExecutor(1, "lora")
        self._loading: dict[str, Future[Adapter]] = {}
        self.held: dict[str, Adapter] = {}
        """By digest, the longest unused first."""
        self.sizes: dict[str, int] = {}
        """Bytes of those."""
        self.failed: dict[str, str] = {}
        self._pinned: set[str] = set()
        """Digests of adapters that are never dropped."""
        self.forgotten: set[str] = set()
        """Digests of adapters that are dropped as soon as no row may have them."""
        self.dropped: list[str] = []
        """Digests of dropped adapters that the planner was not told of."""
        self._unused: set[str] = set()
        """Digests of adapters that were read and that no sequence has had yet."""
        self._hits = self._loads = self._evictions = 0
        self._load_seconds = 0.0
        self._paths: dict[str, str] = {}
        """By digest, of each adapter that was read. It may be read again after it was dropped."""
        self.active: dict[str, Adapter] = {}
        """Those that rows may have."""

    def want(self, digest: str, path: str, *, pinned: bool) -> None:
        """Begins to read an adapter, unless it is there."""
        self._paths[digest] = path
        self.forgotten.discard(digest)
        if pinned:
            self._pinned.add(digest)
        if digest not in self.held and digest not in self._loading:
            self._loading[digest] = self.pool.submit(self._read, digest, path)

    def forget(self, digest: str) -> None:
        """Drops an adapter, as soon as no row may have it."""
        self._pinned.discard(digest)
        self.forgotten.add(digest)
        self.failed.pop(digest, None)
        self.evict()

    def use(self, digest: str) -> None:
        """A sequence has joined the batch with an adapter."""
        self._hits += digest not in self._unused
        self._unused.discard(digest)

    def counts(self) -> Counts:
        """Counts since the start."""
        return Counts(
            self._counts,
            self.sizes,
            sorted(self._pinned),
            self._hits,
            self._loads,
            self._evictions,
            self._load_seconds,
        )

    def adapter(self, digest: str) -> Adapter:
        """An adapter that is used now. Raises ToolkitError where it could not be read."""
        is_dropped = digest not in self.held and digest not in self._loading
        if is_dropped and digest in self._paths and digest not in self.failed:
            # It made room for another one while the planner made this step.
            self._loading[digest] = self.pool.submit(self._read, digest, self._paths[digest])
        self.collect(digest)
        if digest not in self.held:
            why = self.failed.get(digest, "it is not in memory")
            raise ToolkitError(f"an adapter cannot be run on this rank: {why}")
        adapter = self.held[digest] = self.held.pop(digest)
        return adapter

    def _read(self, digest: str, path: str) -> Adapter:
        start = time.monotonic()
        try:
            return self._read_folder(digest, path)
        finally:
            self._load_seconds += time.monotonic() - start

    def collect(self, wait_for: str | None = None) -> None:
        """Takes what has been read, and waits for one adapter."""
        for digest, future in [*self._loading.items()]:
            if not future.done() and digest != wait_for:
                continue
            del self._loading[digest]
            try:
                self.held[digest] = adapter = future.result()
                self.sizes[digest] = adapter.num_bytes
                self._unused.add(digest)
                self._loads += 1
            except (ToolkitError, OSError) as error:
                self.failed[digest] = str(error)
            except Exception as error:
                logger.exception("an adapter could not be read")
                self.failed[digest] = f"{type(error).__name__}: {error}"

    def evict(self) -> None:
        """Drops adapters that no row may have, the longest unused first, until they fit the budget,
        except the last one that was read. Pinned ones stay, and forgotten ones go."""
        budget = int(self._options.host_gib * 2**30)
        for digest in self.forgotten - self.active.keys():
            if digest in self.held:
                self._drop(digest)
            if digest not in self._loading:
                self.forgotten.discard(digest)
        idle = [
            digest
            for digest in self.held
            if digest not in self.active and digest not in self._pinned
        ]
        size = sum(self.sizes[digest] for digest in idle)
        while len(idle) > 1 and (size > budget or len(idle) > self._options.max_host_adapters):
            digest = idle.pop(0)
            size -= self.sizes[digest]
            self._drop(digest)

    def _drop(self, digest: str) -> None:
        del self.held[digest], self.sizes[digest]
        self._unused.discard(digest)
        self.dropped.append(digest)
        self._evictions += 1
