"""How the engine reaches its workers: one broadcast for all, and a thread that takes their reports in."""

from __future__ import annotations

import math
import os
import secrets
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
from toolkit_lm.errors import ConfigError, EngineDeadError, ToolkitError

from toolkit_lm_executor_mp import wire
from toolkit_lm_executor_mp.process import WorkerProcess

PATIENCE = 60.0
"""Seconds that the other ranks get to end a step that has failed on one."""
_LOOK = 1.0
"""Seconds between two looks at whether the processes live, should a fork of one hold its lifeline open."""
_LAST_WORDS = 0.1
"""Seconds to wait for others that die together with a worker."""
_MOST_BYTES = 107 if sys.platform == "linux" else 103
"""Of the path of a unix socket."""
_LARGE = 2**16
"""Bytes of a message from which on it is not copied."""


class Call:
    """A command on its way, and what the ranks that it waits for have answered."""

    def __init__(self, doing: str, ranks: Iterable[int], take: Callable[[list[wire.Done]], Any]) -> None:
        """`doing`: such as "in step 7". `take` makes the result of the answers of `ranks`, in their order."""
        self.doing = doing
        self.ranks = list(ranks)
        self.reports: dict[int, wire.Done | wire.Failed] = {}
        self.future: Future[Any] = Future()
        """It raises what the rank to blame has raised."""
        self._take = take

    @property
    def missing(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank in self.ranks if rank not in self.reports]

    @property
    def failure(self) -> wire.Failed | None:
        """Of the first of `ranks` that has failed."""
        return next((one for rank in self.ranks if isinstance(one := self.reports.get(rank), wire.Failed)), None)

    def finish(self) -> None:
        self.future.set_result(self._take([one for rank in self.ranks if isinstance(one := self.reports[rank], wire.Done)]))

    def fail(self, failed: wire.Failed, doing: str) -> None:
        self.future.set_exception(failed.failure.error(f"on rank {failed.rank} {doing}"))


class Link:
    """The workers of an engine. `call` may be used from any thread, one at a time.

    A rank that fails in a call leaves its groups, so that those who wait for it fail as well: its failure is theirs. Until `connect`,
    all calls fail. Where a worker dies, all are ended, and all calls fail with EngineDeadError, for good.
    """

    def __init__(self, num_ranks: int) -> None:
        """Starts the processes. Raises EngineDeadError where that fails."""
        self.num_ranks = num_ranks
        self.has_failed = False
        """A call has, since the ranks were connected."""
        self._owner = os.getpid()
        self._key = secrets.token_bytes(wire.KEY_BYTES)
        self._folder = self._make_folder()
        self._context = zmq.Context()
        self._reports = wire.make_socket(self._context, zmq.PULL)
        self._reports.bind(f"ipc://{self._folder}/reports")
        self._commands = [wire.make_socket(self._context, zmq.PUSH) for _ in range(num_ranks)]
        self._wake_send, self._wake_recv = socket.socketpair()
        self._lock = threading.RLock()
        self._num_calls = 0
        self._calls: dict[int, Call] = {}
        """By number, those that are not over."""
        self._oldest_call = 0
        """The first since then."""
        self._culprit: wire.Failed | None = None
        """Who failed first, since the ranks were connected."""
        self._deadline: float | None = None
        """When the other ranks must have answered."""
        self._death: ToolkitError | None = None
        self._ended = False
        self._thread_ends = False
        """What `end` leaves to the thread."""
        self._thread = threading.Thread(target=self._run, name="toolkit_lm-workers", daemon=True)
        self.processes: list[WorkerProcess] = []
        try:
            num_threads = max(1, _engine_threads() // num_ranks)
            for rank in range(num_ranks):
                self._commands[rank].connect(f"ipc://{self._folder}/{rank}")
                self.processes.append(WorkerProcess(rank, num_threads, self._folder, self._key))
        except BaseException:
            self.end()
            raise

    @staticmethod
    def _make_folder(prefix: str = "toolkit_lm-") -> Path:
        """That only this user may enter."""
        try:
            folder = Path(tempfile.mkdtemp(prefix=prefix))
        except OSError as error:
            raise EngineDeadError(f"the folder of the workers' sockets cannot be made: {error}. Set TMPDIR to another.") from error
        if len(os.fsencode(folder / "reports")) > _MOST_BYTES:
            folder.rmdir()
            raise ConfigError(
                f"the path of the temporary folder {str(folder.parent)!r} is too long: a socket in it may have at most "
                f"{_MOST_BYTES} bytes. Set TMPDIR to a shorter one."
            )
        return folder

    def start(self, start: wire.Start, end: float) -> None:
        """Checks who the workers are, has them load their plugins, and connects them. Raises what fails there.

        `end`: of time.monotonic(), when they must be ready.
        """
        self._greet(end)
        self._thread.start()
        self.answers(self.call(start, "while importing"), end)
        self.answers(self.connect(), end)

    def answers(self, call: Call, end: float | None) -> Any:
        """Its result. Raises EngineDeadError where `end` comes first."""
        try:
            return call.future.result(None if end is None else max(0.0, end - time.monotonic()))
        except TimeoutError as error:
            raise _late(call.missing, call.doing) from error

    def connect(self) -> Call:
        """Gives the ranks new groups, where nothing of a failed step waits."""
        with self._lock:
            # Workers know a later one by the first one's name, should the engine die before it has told them.
            folder = self._folder if self._num_calls == 1 else self._make_folder(f"{self._folder.name}-")
            self.has_failed, self._culprit, self._deadline = False, None, None
            self._oldest_call = self._num_calls
            call = self.call(wire.Connect(str(folder)), "while connecting the ranks")
        call.future.add_done_callback(lambda _: shutil.rmtree(folder, ignore_errors=True))
        return call

    def call(
        self,
        command: wire.Command,
        doing: str,
        ranks: Iterable[int] | None = None,
        take: Callable[[list[wire.Done]], Any] = lambda done: done,
    ) -> Call:
        """Sends a command to all ranks. Those in `ranks`, by default all, answer it; `take` makes the result of their answers."""
        call = Call(doing, range(self.num_ranks) if ranks is None else ranks, take)
        try:
            message = wire.encode(command)
        except Exception as error:
            # Such as a logits processor's argument that is no plain value: a request's fault, and no worker's.
            call.future.set_exception(error)
            return call
        with self._lock:
            if self._death is not None or self._ended:
                call.future.set_exception(self._death or _shut_down())
                return call
            self._calls[self._num_calls] = call
            self._num_calls += 1
            for socket_ in self._commands:
                # Large arrays among it are not copied.
                socket_.send(message, 0, len(message) < _LARGE)
        return call

    def end(self) -> None:
        """Ends the workers. Safe to call twice, and from the thread itself, where garbage may be collected."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._thread_ends = threading.current_thread() is self._thread
        self._wake_send.close()
        if self._thread_ends:
            # Its sockets may be in use further up the stack.
            return
        if self._thread.ident is not None:
            self._thread.join()
        self._close()

    def _close(self) -> None:
        with self._lock:
            self._fail_all(_shut_down())
        for process in self.processes:
            process.lifeline.close()
        for process in self.processes:
            process.end()
        for one in (*self._commands, self._reports):
            one.close(linger=0)
        self._context.term()
        self._wake_recv.close()
        if os.getpid() == self._owner:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _greet(self, end: float) -> None:
        nonces: dict[int, bytes] = {}
        proven: set[int] = set()
        while len(proven) < self.num_ranks:
            self._wait(min(end, time.monotonic() + _LOOK))
            for report in self._take_reports():
                if isinstance(report, wire.Hello) and 0 <= report.rank < self.num_ranks and report.rank not in nonces:
                    nonces[report.rank] = secrets.token_bytes(wire.KEY_BYTES)
                    proof = wire.prove(self._key, "engine", report.rank, report.nonce)
                    self._commands[report.rank].send(wire.encode(wire.Challenge(proof, nonces[report.rank])))
                elif isinstance(report, wire.Proof) and report.rank in nonces:
                    if not secrets.compare_digest(report.proof, wire.prove(self._key, "worker", report.rank, nonces[report.rank])):
                        raise EngineDeadError(f"who calls itself the worker of rank {report.rank} does not know the key of the launch.")
                    proven.add(report.rank)
            self._look_for_deaths("while importing")
            if self._death is not None:
                raise self._death
            if time.monotonic() >= end:
                raise _late([rank for rank in range(self.num_ranks) if rank not in proven], "while importing")

    def _run(self) -> None:
        try:
            self._listen()
        except Exception as error:
            with self._lock:
                self._die(f"their reports cannot be read any more: {error!r}", error)
        if self._thread_ends:
            self._close()

    def _listen(self) -> None:
        while self._death is None:
            # A deadline of calls that are over wakes nobody.
            self._wait(min(time.monotonic() + _LOOK, (self._deadline if self._calls else None) or math.inf))
            if self._ended:
                return
            with self._lock:
                for report in self._take_reports():
                    self._take(report)
                self._settle()
                self._look_for_deaths(next((call.doing for call in self._calls.values()), "between steps"))

    def _wait(self, end: float) -> None:
        """Until there is a report, a process has died, `self.end` is called, or time is over."""
        poller = zmq.Poller()
        for one in (self._reports, self._wake_recv, *(process.lifeline for process in self.processes)):
            poller.register(one, zmq.POLLIN)
        poller.poll(math.ceil(1000 * max(0.0, end - time.monotonic())))

    def _take_reports(self) -> list[wire.Report]:
        taken = []
        while True:
            try:
                taken.append(wire.decode_report(self._reports.recv(zmq.NOBLOCK, copy=False).buffer))
            except zmq.Again:
                return taken

    def _take(self, report: wire.Report) -> None:
        if not isinstance(report, wire.Done | wire.Failed):
            return
        if (call := self._calls.get(report.call)) is not None:
            call.reports[report.rank] = report
        # What a rank says of a call before they were connected anew is old news.
        if isinstance(report, wire.Failed) and report.call >= self._oldest_call:
            self.has_failed = True
            self._deadline = self._deadline or time.monotonic() + PATIENCE
            if not report.is_victim and self._culprit is None:
                self._culprit = report
                self._culprit_doing = "" if call is None else call.doing

    def _settle(self) -> None:
        """Ends the calls that are over."""
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        for number, call in list(self._calls.items()):
            blamed = self._culprit or (call.failure if is_late else None)
            if not call.missing and call.failure is None:
                call.finish()
                del self._calls[number]
            elif blamed is not None and (call.failure is not None or len(call.ranks) == self.num_ranks):
                # A call that all answer is over with the first failure; of a step, one rank knows whether it has come through.
                del self._calls[number]
                call.fail(blamed, call.doing)
            elif is_late:
                missing = ", ".join(map(str, call.missing))
                self._die(f"rank {missing} had not answered {PATIENCE:g} s after another had failed, {call.doing}")
                return

    def _look_for_deaths(self, doing: str) -> None:
        if self._death is not None or all(_lives(process) for process in self.processes):
            return
        # Others may have died with it.
        time.sleep(_LAST_WORDS)
        dead = [process for process in self.processes if not _lives(process)]
        for process in self.processes:
            if process not in dead:
                process.kill()
        # Whom a signal ended is to blame before those that could not go on without it.
        deaths = sorted(((process.death(doing), process.exit_code) for process in dead), key=lambda one: one[1] >= 0)
        self._death = deaths[0][0]
        self._fail_all(self._death)

    def _die(self, why: str, cause: Exception | None = None) -> None:
        self._death = EngineDeadError(f"the workers are ended: {why}.")
        self._death.__cause__ = cause
        if self._culprit is not None:
            self._death.add_note(f"on rank {self._culprit.rank}: {self._culprit.failure.traceback}")
        for process in self.processes:
            process.kill()
        self._fail_all(self._death)

    def _fail_all(self, error: ToolkitError) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            with suppress(InvalidStateError):
                call.future.set_exception(error)


def _engine_threads() -> int:
    """How many threads an engine of one rank would compute in."""
    with suppress(KeyError, ValueError):
        return int(os.environ["OMP_NUM_THREADS"])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lives(process: WorkerProcess) -> bool:
    readable, _, _ = select.select([process.lifeline], [], [], 0)
    return not readable and process.is_alive


def _late(ranks: Sequence[int], doing: str) -> EngineDeadError:
    return EngineDeadError(
        f"the workers of rank {', '.join(map(str, ranks))} were not ready within start_timeout: they got no further {doing}."
    )


def _shut_down() -> EngineDeadError:
    return EngineDeadError("the engine has been shut down.")
