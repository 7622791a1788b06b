"""The workers of one machine: their processes, and the sockets that reach them."""

from __future__ import annotations

import os
import secrets
import select
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import zmq
from toolkit_lm.errors import ConfigError, EngineDeadError

from toolkit_lm_executor_mp import wire
from toolkit_lm_executor_mp.process import WorkerProcess

_LAST_WORDS = 0.1
"""Seconds to wait for others that die together with a worker."""
_MOST_BYTES = 107 if sys.platform == "linux" else 103
"""Bytes that the path of a Unix socket may have."""
_LARGE = 2**16
"""Bytes from which on a message is sent without a copy."""


class LocalWorkers:
    """Workers that this process has started. They die with it.

    It authenticates them: each side proves that it knows the key, which the worker got from this
    process.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], ranks: Sequence[int], master: str = ""
    ) -> None:
        """Starts a process for each of `ranks`, which may be empty. Raises EngineDeadError if that
        fails.

        `master`: the address of the engine's machine if ranks are on several machines, else "".
        """
        self.ranks = ranks
        self.processes: list[WorkerProcess] = []
        self._owner = os.getpid()
        self._key = secrets.token_bytes(wire.KEY_BYTES)
        self._nonces: dict[int, bytes] = {}
        self._proven: set[int] = set()
        self.folder = make_folder()
        self.reports = wire.make_socket(context, zmq.PULL)
        self.reports.bind(f"ipc://{self.folder}/reports")
        self._commands = {rank: wire.make_socket(context, zmq.PUSH) for rank in ranks}
        try:
            num_threads = max(1, _engine_threads() // max(1, len(ranks)))
            for rank in ranks:
                self._commands[rank].connect(f"ipc://{self.folder}/{rank}")
                self.processes.append(
                    WorkerProcess(rank, num_threads, self.folder, self._key, master)
                )
        except BaseException:
            self.close()
            raise

    @property
    def unknown(self) -> list[int]:
        """Ranks that are not authenticated yet."""
        return [rank for rank in self.ranks if rank not in self._proven]

    def greet(self, report: wire.Report) -> None:
        """Handles a report of the handshake. Raises EngineDeadError for a sender that does not know
        the key."""
        if (
            isinstance(report, wire.Hello)
            and report.rank in self.ranks
            and report.rank not in self._nonces
        ):
            self._nonces[report.rank] = secrets.token_bytes(wire.KEY_BYTES)
            proof = wire.prove(self._key, "engine", report.rank, report.nonce)
            self._commands[report.rank].send(
                wire.encode(wire.Challenge(proof, self._nonces[report.rank]))
            )
        elif isinstance(report, wire.Proof) and report.rank in self._nonces:
            if not secrets.compare_digest(
                report.proof,
                wire.prove(self._key, "worker", report.rank, self._nonces[report.rank]),
            ):
                raise EngineDeadError(
                    f"who calls itself the worker of rank {report.rank} does not know the key of "
                    "the launch."
                )
            self._proven.add(report.rank)

    def receive(self) -> list[zmq.Frame]:
        """The reports that have come, each an encoded message of wire.py."""
        return receive_all(self.reports)

    def send(self, message: bytes | zmq.Frame) -> None:
        """Sends an encoded command to all workers."""
        copied = isinstance(message, bytes) and len(message) < _LARGE
        for socket in self._commands.values():
            # Large arrays among it are not copied.
            socket.send(message, 0, copied)

    def find_death(self, doing: str) -> EngineDeadError | None:
        """Returns the error of a worker that has died, or None. All other workers are then killed.

        `doing`: a phrase for the error, such as "in step 7".
        """
        if all(_lives(process) for process in self.processes):
            return None
        # Others may have died with it.
        time.sleep(_LAST_WORDS)
        dead = [process for process in self.processes if not _lives(process)]
        for process in self.processes:
            if process not in dead:
                process.kill()
        # Whom a signal ended is to blame before those that could not go on without it.
        deaths = sorted(
            ((process.death(doing), process.exit_code) for process in dead),
            key=lambda pair: pair[1] >= 0,
        )
        return deaths[0][0]

    def kill(self) -> None:
        """Kills the workers at once."""
        for process in self.processes:
            process.kill()

    def remove_folder(self) -> None:
        """Removes the sockets' folder, which is of no use once all are connected."""
        if os.getpid() == self._owner:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Ends the workers, and closes the sockets."""
        for process in self.processes:
            process.lifeline.close()
        for process in self.processes:
            process.end()
        for socket in (*self._commands.values(), self.reports):
            socket.close(linger=0)
        self.remove_folder()


def make_folder(prefix: str = "toolkit_lm-") -> Path:
    """Makes a folder that only this user may enter.

    Raises EngineDeadError, and ConfigError if its path is too long for a socket.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise EngineDeadError(
            f"the folder of the workers' sockets cannot be made: {error}. Set TMPDIR to another."
        ) from error
    if len(os.fsencode(folder / "reports")) > _MOST_BYTES:
        folder.rmdir()
        raise ConfigError(
            f"the path of the temporary folder {str(folder.parent)!r} is too long: a socket in "
            "it may have at most "
            f"{_MOST_BYTES} bytes. Set TMPDIR to a shorter one."
        )
    return folder


def receive_all(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """Receives the messages that have come, each of one frame. Never waits."""
    taken = []
    while True:
        try:
            taken.append(socket.recv(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            return taken


def _engine_threads() -> int:
    """The number of threads that an engine of one rank would use."""
    with suppress(KeyError, ValueError):
        return int(os.environ["OMP_NUM_THREADS"])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lives(process: WorkerProcess) -> bool:
    readable, _, _ = select.select([process.lifeline], [], [], 0)
    return not readable and process.is_alive
