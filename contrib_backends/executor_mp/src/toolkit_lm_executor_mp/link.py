"""The engine's connection to its workers: it broadcasts commands, and a thread receives the
reports."""

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
"""Seconds that the other ranks get to finish a step after one rank has failed."""
_LOOK = 1.0
"""Seconds between two checks that the processes live, in case a fork of one holds its lifeline
open."""


MakeNodes = Callable[[zmq.Context[zmq.Socket[bytes]], VllmConfig], Nodes | None]
"""Factory of the connections to other nodes. It returns None where there is one machine."""


class Call:
    """A command that was sent, and the answers of its ranks so far."""

    def __init__(
        self, doing: str, ranks: Iterable[int], combine: Callable[[list[wire.Done]], Any]
    ) -> None:
        """Keeps the ranks whose answers are due.

        `doing`: a phrase for errors, such as "in step 7". `combine` makes the result from the
        answers, in the order of `ranks`."""
        self.doing = doing
        self.ranks = list(ranks)
        self.reports: dict[int, wire.Done | wire.Failed] = {}
        self.future: Future[Any] = Future()
        """The call's result, or the error of the rank that failed first."""
        self._combine = combine

    @property
    def missing(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank in self.ranks if rank not in self.reports]

    @property
    def failure(self) -> wire.Failed | None:
        """The report of the first of `ranks` that has failed, or None."""
        return next(
            (
                report
                for rank in self.ranks
                if isinstance(report := self.reports.get(rank), wire.Failed)
            ),
            None,
        )

    def finish(self) -> None:
        self.future.set_result(
            self._combine(
                [
                    report
                    for rank in self.ranks
                    if isinstance(report := self.reports[rank], wire.Done)
                ]
            )
        )

    def fail(self, failed: wire.Failed, machine: str) -> None:
        """Sets the error of the rank that failed. `machine`: its node for the error, such as " of
        node 1 (host)"."""
        self.future.set_exception(
            failed.failure.error(f"on rank {failed.rank}{machine} {self.doing}")
        )


class Link:
    """An engine's workers. `call` may be used from any thread, one at a time.

    A rank that fails in a call leaves its groups. Ranks that wait for it then fail as well, and its
    error is reported for all. All calls fail until `connect`.

    A worker that dies ends all workers. All later calls fail with EngineDeadError.
    """

    def __init__(self, config: VllmConfig, make_nodes: MakeNodes = make_nodes) -> None:
        """Starts the worker processes of this machine.

        Raises EngineDeadError if that fails, ConfigError for a config that several nodes cannot
        run.
        """
        self.num_ranks = config.parallel.num_ranks
        self.has_failed = False
        """Whether a call has failed since the ranks were last connected."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake_send, self._wake_recv = socket.socketpair()
        self._lock = threading.RLock()
        self._num_calls = 0
        self._calls: dict[int, Call] = {}
        """Unfinished calls by number."""
        self._oldest_call = 0
        """Number of the first call since the ranks were last connected."""
        self._culprit: wire.Failed | None = None
        """The first failure since the ranks were last connected."""
        self._deadline: float | None = None
        """Value of time.monotonic() by which the other ranks must answer after a failure."""
        self._death: ToolkitError | None = None
        self._ended = False
        self._thread_ends = False
        """Whether the thread closes the sockets, since `end` was called in it."""
        self._thread = threading.Thread(target=self._run, name="toolkit_lm-workers", daemon=True)
        self._nodes: Nodes | None = None
        self._local: LocalWorkers | None = None
        self.reason = ""
        """Why the workers are ended, if something has failed. Other nodes are told."""
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
        """The worker processes of this machine, in the order of ranks."""
        return [] if self._local is None else self._local.processes

    def start(self, start: wire.Start, end: float) -> None:
        """Authenticates the workers, has them load their plugins, and connects the ranks. Raises
        their errors.

        `end`: the value of time.monotonic() by which they must be ready.
        """
        self._greet(end)
        self._thread.start()
        self.answers(self.call(start, "while importing"), end)
        self.answers(self.connect(), end)

    def answers(self, call: Call, end: float | None) -> Any:
        """The call's result. Raises EngineDeadError if `end`, a value of time.monotonic(), comes
        first."""
        try:
            return call.future.result(None if end is None else max(0.0, end - time.monotonic()))
        except TimeoutError as error:
            raise _late(call.missing, call.doing) from error

    def connect(self) -> Call:
        """Gives the ranks new groups, so that nothing of a failed step is left in them."""
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
        combine: Callable[[list[wire.Done]], Any] = lambda done: done,
    ) -> Call:
        """Sends a command to all ranks.

        `ranks`: those that answer it, by default all. `combine` makes the result from their
        answers."""
        call = Call(doing, range(self.num_ranks) if ranks is None else ranks, combine)
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
        """Raises EngineDeadError if a worker has died."""
        if self._death is not None:
            raise self._death

    def end(self) -> None:
        """Ends the workers. Safe to call twice, and in the link's own thread, where garbage
        collection may call it."""
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
        """Waits until all local ranks and all nodes are authenticated. Raises EngineDeadError."""
        while self._workers.unknown or (self._nodes is not None and self._nodes.missing):
            self._wait(min(end, time.monotonic() + _LOOK))
            for report in self._receive_reports():
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
                for report in self._receive_reports():
                    self._process(report)
                self._settle()
                self._look_for_deaths(
                    next((call.doing for call in self._calls.values()), "between steps")
                )

    def _wait(self, end: float) -> None:
        """Waits for a report, for a process to die, for `self.end`, or until `end` of
        time.monotonic()."""
        poller = zmq.Poller()
        doors = [] if self._nodes is None else [self._nodes.door]
        for source in (
            self._workers.reports,
            self._wake_recv,
            *doors,
            *(process.lifeline for process in self.processes),
        ):
            poller.register(source, zmq.POLLIN)
        poller.poll(math.ceil(1000 * max(0.0, end - time.monotonic())))

    def _receive_reports(self) -> list[wire.Report]:
        frames = self._workers.receive() + ([] if self._nodes is None else self._nodes.receive())
        return [wire.decode_report(frame.buffer) for frame in frames]

    def _process(self, report: wire.Report) -> None:
        if not isinstance(report, wire.Done | wire.Failed):
            return
        if (call := self._calls.get(report.call)) is not None:
            call.reports[report.rank] = report
        # Reports of calls from before the ranks reconnected are outdated.
        if isinstance(report, wire.Failed) and report.call >= self._oldest_call:
            self.has_failed = True
            self._deadline = self._deadline or time.monotonic() + PATIENCE
            if not report.is_victim and self._culprit is None:
                self._culprit = report

    def _settle(self) -> None:
        """Finishes the calls whose answers have come, and fails those that a failure has ended."""
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
        """Kills all workers for good, on all nodes. All calls fail with `death`."""
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
