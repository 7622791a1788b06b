"""How the engine reaches its workers: one broadcast for all, and a thread that takes their reports
in."""

from __future__ import annotations

import math
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import zmq
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import EngineDeadError, ToolkitError

from toolkit_lm_executor_mp import wire
from toolkit_lm_executor_mp.local import LocalWorkers, make_folder
from toolkit_lm_executor_mp.nodes import Nodes, make_nodes
from toolkit_lm_executor_mp.process import WorkerProcess

PATIENCE = 60.0
"""Seconds that the other ranks get to end a step that has failed on one."""
_LOOK = 1.0
"""Seconds between two looks at whether the processes live, should a fork of one hold its lifeline
open."""


MakeNodes = Callable[[zmq.Context[zmq.Socket[bytes]], VllmConfig], Nodes | None]
"""Makes the engine's side of the other machines, where there are any."""


class Call:
    """A command on its way, and what the ranks that it waits for have answered."""

    def __init__(
        self, doing: str, ranks: Iterable[int], take: Callable[[list[wire.Done]], Any]
    ) -> None:
        """`doing`: such as "in step 7". `take` makes the result of the answers of `ranks`, in their
        order."""
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
        return next(
            (one for rank in self.ranks if isinstance(one := self.reports.get(rank), wire.Failed)),
            None,
        )

    def finish(self) -> None:
        self.future.set_result(
            self._take(
                [one for rank in self.ranks if isinstance(one := self.reports[rank], wire.Done)]
            )
        )

    def fail(self, failed: wire.Failed, machine: str) -> None:
        """`machine`: such as " of node 1 (host)"."""
        self.future.set_exception(
            failed.failure.error(f"on rank {failed.rank}{machine} {self.doing}")
        )


class Link:
    """The workers of an engine. `call` may be used from any thread, one at a time.

    A rank that fails in a call leaves its groups, so that those who wait for it fail as well: its
    failure is theirs. Until `connect`, all calls fail. Where a worker dies, all are ended, and all
    calls fail with EngineDeadError, for good.
    """

    def __init__(self, config: VllmConfig, make_nodes: MakeNodes = make_nodes) -> None:
        """Starts the processes of this machine. Raises EngineDeadError where that fails,
        ConfigError for what nodes cannot run."""
        self.num_ranks = config.parallel.num_ranks
        self.has_failed = False
        """A call has, since the ranks were connected."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
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
        self._nodes: Nodes | None = None
        self._local: LocalWorkers | None = None
        self.reason = ""
        """Why the workers are ended, where something has failed: other machines are told."""
        try:
            self._nodes = make_nodes(self._context, config)
            if self._nodes is None:
                self._local = LocalWorkers(self._context, range(self.num_ranks))
            else:
                self._local = LocalWorkers(
                    self._context, self._nodes.local_ranks, self._nodes.address
                )
        except BaseException:
            self.end()
            raise

    @property
    def processes(self) -> list[WorkerProcess]:
        """Of this machine's workers, by rank."""
        return [] if self._local is None else self._local.processes

    def start(self, start: wire.Start, end: float) -> None:
        """Checks who the workers are, has them load their plugins, and connects them. Raises what
        fails there.

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
            # Workers know a later one by the first one's name, should the engine die before it has
            # told them.
            is_first = self._num_calls == 1 or self._nodes is not None
            folder = (
                self._workers.folder if is_first else make_folder(f"{self._workers.folder.name}-")
            )
            self.has_failed = False
            self._culprit = None
            self._deadline = None
            self._oldest_call = self._num_calls
            command = (
                wire.Connect(str(folder))
                if self._nodes is None
                else self._nodes.meeting(str(folder))
            )
            call = self.call(command, "while connecting the ranks")

        def met(_: Future[Any]) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            if self._nodes is not None:
                with self._lock:
                    self._nodes.end_meeting()

        call.future.add_done_callback(met)
        return call

    def call(
        self,
        command: wire.Command,
        doing: str,
        ranks: Iterable[int] | None = None,
        take: Callable[[list[wire.Done]], Any] = lambda done: done,
    ) -> Call:
        """Sends a command to all ranks. Those in `ranks`, by default all, answer it; `take` makes
        the result of their answers."""
        call = Call(doing, range(self.num_ranks) if ranks is None else ranks, take)
        try:
            message = wire.encode(command)
        except Exception as error:
            # Such as a logits processor's argument that is no plain value: a request's fault, and
            # no worker's.
            call.future.set_exception(error)
            return call
        with self._lock:
            if self._death is not None or self._ended:
                call.future.set_exception(self._death or _shut_down())
                return call
            self._calls[self._num_calls] = call
            self._num_calls += 1
            self._workers.send(message)
            if self._nodes is not None:
                self._nodes.send(message)
        return call

    def check(self) -> None:
        """Raises EngineDeadError where a worker has died."""
        if self._death is not None:
            raise self._death

    def end(self) -> None:
        """Ends the workers. Safe to call twice, and from the thread itself, where garbage may be
        collected."""
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
        if self._nodes is not None:
            self._nodes.close(self.reason or str(self._death or ""))
        if self._local is not None:
            self._local.close()
        self._context.term()
        self._wake_recv.close()

    @property
    def _workers(self) -> LocalWorkers:
        assert self._local is not None, "__init__ has made them"
        return self._local

    def _greet(self, end: float) -> None:
        """Until all ranks of this machine, and all nodes with theirs, have proven who they are."""
        while self._workers.unknown or (self._nodes is not None and self._nodes.missing):
            self._wait(min(end, time.monotonic() + _LOOK))
            for report in self._take_reports():
                self._workers.greet(report)
            self._look_for_deaths("while importing")
            self.check()
            if (
                self._nodes is not None
                and self._nodes.missing
                and time.monotonic() >= end - self._nodes.margin
            ):
                raise self._nodes.late()
            if time.monotonic() >= end:
                raise _late(self._workers.unknown, "while importing")

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
            self._wait(
                min(time.monotonic() + _LOOK, (self._deadline if self._calls else None) or math.inf)
            )
            if self._ended:
                return
            with self._lock:
                for report in self._take_reports():
                    self._take(report)
                self._settle()
                self._look_for_deaths(
                    next((call.doing for call in self._calls.values()), "between steps")
                )

    def _wait(self, end: float) -> None:
        """Until there is a report, a process has died, `self.end` is called, or time is over."""
        poller = zmq.Poller()
        doors = [] if self._nodes is None else [self._nodes.door]
        for one in (
            self._workers.reports,
            self._wake_recv,
            *doors,
            *(process.lifeline for process in self.processes),
        ):
            poller.register(one, zmq.POLLIN)
        poller.poll(math.ceil(1000 * max(0.0, end - time.monotonic())))

    def _take_reports(self) -> list[wire.Report]:
        frames = self._workers.take() + ([] if self._nodes is None else self._nodes.take())
        return [wire.decode_report(frame.buffer) for frame in frames]

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

    def _settle(self) -> None:
        """Ends the calls that are over."""
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        for number, call in list(self._calls.items()):
            blamed = self._culprit or (call.failure if is_late else None)
            if not call.missing and call.failure is None:
                call.finish()
                del self._calls[number]
            elif blamed is not None and (
                call.failure is not None or len(call.ranks) == self.num_ranks
            ):
                # A call that all answer is over with the first failure; of a step, one rank knows
                # whether it has come through.
                del self._calls[number]
                call.fail(blamed, "" if self._nodes is None else self._nodes.machine(blamed.rank))
            elif is_late:
                missing = ", ".join(map(str, call.missing))
                self._die(
                    f"rank {missing} had not answered {PATIENCE:g} s after another had failed, "
                    f"{call.doing}"
                )
                return

    def _look_for_deaths(self, doing: str) -> None:
        if self._death is not None:
            return
        # Who dies because another machine has gone is not to blame.
        death = (self._nodes and self._nodes.find_death(doing)) or self._workers.find_death(doing)
        if death is not None:
            self._end_all(death)

    def _die(self, why: str, cause: Exception | None = None) -> None:
        death = EngineDeadError(f"the workers are ended: {why}.")
        death.__cause__ = cause
        if self._culprit is not None:
            death.add_note(f"on rank {self._culprit.rank}: {self._culprit.failure.traceback}")
        self._end_all(death)

    def _end_all(self, death: EngineDeadError) -> None:
        """For good: wherever they are."""
        self._death = death
        self._workers.kill()
        if self._nodes is not None:
            self._nodes.dismiss(str(death))
        self._fail_all(death)

    def _fail_all(self, error: ToolkitError) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            with suppress(InvalidStateError):
                call.future.set_exception(error)


def _late(ranks: Sequence[int], doing: str) -> EngineDeadError:
    return EngineDeadError(
        f"the workers of rank {', '.join(map(str, ranks))} were not ready within start_timeout: "
        f"they got no further {doing}."
    )


def _shut_down() -> EngineDeadError:
    return EngineDeadError("the engine has been shut down.")
