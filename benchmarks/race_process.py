"""Systems of race.py as processes, which are stopped while another one has its turn."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from race_system import WORKS, kind_of

MOST_SECONDS = 900
"""That a system may take to start, or for one piece of work."""


class System:
    """A process of race_system.py, and the processes that it starts."""

    answers = True
    """On stdout. Otherwise what it writes there is in its log."""

    def __init__(
        self, name: str, command: Sequence[str | Path], environ: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        # Some systems obey it, and others have a thread per core in any case.
        inherited = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        begun = time.monotonic()
        with log.open("w") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self.answers else err,
                stderr=err,
                text=True,
                env={**inherited, "HF_HUB_OFFLINE": "1", **environ},
                start_new_session=True,
            )
        try:
            first, self.version = self._wait_ready()
        except BaseException:
            self.kill()
            raise
        self.start_seconds = first - begun
        self.pause()

    def _wait_ready(self) -> tuple[float, str]:
        """time.monotonic() at its first token, and its version."""
        ready = json.loads(self._answer("ready"))
        return ready["first"], ready["version"]

    def _answer(self, word: str) -> str:
        assert self.process.stdout is not None
        # Who hangs is ended, and its pipe with it.
        clock = threading.Timer(MOST_SECONDS, self._signal, [signal.SIGKILL])
        clock.start()
        try:
            for line in self.process.stdout:
                if line.startswith(f"{word} "):
                    return line.removeprefix(word)
        finally:
            clock.cancel()
        raise self._ended()

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"{self.name} ended: {self.log.read_text()[-4000:]}")

    def ask(self, line: str) -> str:
        """Its answer to a line, in its turn."""
        assert self.process.stdin is not None
        self.resume()
        try:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answer = self._answer("took")
        self.pause()
        return answer

    def figures(self, work: str, seed: int) -> dict[str, float]:
        """Figures by row of the table: here one, tokens or sentences a second. Those of a warm-up
        mean nothing."""
        kind = kind_of(work)
        return {work: WORKS[kind].tokens / float(self.ask(f"{kind} {seed}"))}

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def pause(self) -> None:
        """Some systems go on polling when they are idle."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def peak_bytes(self) -> int:
        """Pages that processes share count in each."""
        return sum(map(peak_bytes, members(self.process.pid)))

    def stop(self) -> None:
        self.resume()
        self._end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()

    def _end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def members(group: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ProcessLookupError):
            if entry.name.isdecimal() and os.getpgid(int(entry.name)) == group:
                yield int(entry.name)


def peak_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def busy_neighbour() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()
