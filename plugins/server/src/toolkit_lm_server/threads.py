"""Threads of the server. Its own are daemons, so that hanging work cannot keep the process alive.
Others are shared by clients."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

from toolkit_lm_server.caller import CALLER

CLOSING = 5
"""Seconds that the last answers get at the end, and then the engine."""

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")

Result = TypeVar("Result")


class SharedThreads(ThreadPoolExecutor):
    """Threads that clients share. Each client keeps half of the cores busy at most. Where threads
    are too few, clients take turns.

    `waiting`: the work mostly waits for other machines, and keeps no core busy. Each client may
    have half of the threads.
    """

    def __init__(self, num_threads: int | None = None, *, waiting: bool = False) -> None:
        super().__init__(num_threads, thread_name_prefix="toolkit_lm-shared")
        self._most = max(
            min(self._max_workers, self._max_workers if waiting else usable_cores()) // 2, 1
        )
        self._waiting: defaultdict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = defaultdict(
            deque
        )
        """Work that waits for a thread, by client."""
        self._turns: Counter[str] = Counter()
        """Threads that each client has, or waits for."""
        self._lock = threading.Lock()

    def submit(
        self, function: Callable[..., Result], /, *args: Any, **options: Any
    ) -> Future[Result]:
        client = CALLER.get().client
        future = Future[Result]()
        with self._lock:
            self._waiting[client].append((future, partial(function, *args, **options)))
            if self._turns[client] < self._most:
                super().submit(self._turn, client)
                self._turns[client] += 1
        return future

    def _turn(self, client: str) -> None:
        """Runs the first waiting work of a client, then asks for another turn. Turns that others
        have asked for come first."""
        with self._lock:
            if not self._waiting[client]:
                self._turns[client] -= 1
                if not self._turns[client]:
                    del self._turns[client], self._waiting[client]
                return
            future, work = self._waiting[client].popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        # A failed future's traceback holds this frame.
        del future, work
        super().submit(self._turn, client)


def usable_cores(root: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> int:
    """Cores that this process may run on. Fewer where a control group around it grants fewer."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        return min(cores, math.ceil(min(_quotas(root, own), default=cores)))
    except OSError:
        return cores


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """Cores that control groups with a quota grant, in either layout of their files."""
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        inner = Path(path.lstrip("/"))
        for group in (root / controllers / folder for folder in (inner, *inner.parents)):
            files = [
                file
                for file in (
                    group / "cpu.max",
                    group / "cpu.cfs_quota_us",
                    group / "cpu.cfs_period_us",
                )
                if file.is_file()
            ]
            quota, period = [*" ".join(file.read_text() for file in files).split(), "", ""][:2]
            if quota.isdigit() and period.isdigit():
                yield int(quota) / int(period)


def in_shared_thread(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler, run in a thread that clients share where FastAPI would use one of its own.
    Others stay as they are."""
    waits = (
        inspect.iscoroutinefunction(handler)
        or inspect.isasyncgenfunction(handler)
        or inspect.isgeneratorfunction(handler)
    )
    if waits or not inspect.isroutine(handler):
        return handler

    @wraps(handler)
    async def run(*arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(handler, *arguments, **options)

    return run


async def aside(work: Callable[..., Result], *arguments: Any) -> Result:
    """The result of `work`, which may look at all of the request's body. A shared thread does it
    where the body is large."""
    if CALLER.get().is_large:
        return await asyncio.to_thread(work, *arguments)
    return work(*arguments)


def in_thread(work: Callable[[], Result]) -> Future[Result]:
    """A future of the result of `work`, which runs in a daemon thread."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, name="toolkit_lm-server", daemon=True).start()
    return future


def close(making: Future[Any]) -> Future[None]:
    """Closes an engine. Waits first where it is still being made."""

    def end() -> None:
        if making.exception() is None:
            making.result().close()

    return in_thread(end)
