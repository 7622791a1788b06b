"""FFmpeg in a process of its own, whose memory and time are bounded: what asks it, and hears its
answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from toolkit_lm_media.refusal import RefusedError

_PROGRAM = Path(__file__).with_name("movie_decoder.py")
_SECONDS = 60
"""Seconds of processor time."""
_SHARED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Environment variables that the decoder's process inherits."""


class Decoder:
    """One file's. Where it fails, or wants more than it may have, it ends alone. Methods raise
    RefusedError."""

    def __init__(self) -> None:
        # -P: this folder's modules are not the child's.
        self._process = subprocess.Popen(  # nosec B603 # our own program
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _SHARED if name in os.environ},
        )

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def ask(self, question: dict[str, Any], data: bytes = b"") -> dict[str, Any]:
        """The answer to a question, after which `data` goes to the process, too."""
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(
                json.dumps({"seconds": _SECONDS, **question}).encode() + b"\n" + data
            )
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # Its last words are read below.
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line."""
        assert self._process.stdout is not None, "it is a pipe"
        answer: dict[str, Any] = json.loads(
            self._process.stdout.readline() or b'{"refused": "it cannot be decoded within bounds"}'
        )
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return answer

    def read(self, count: int) -> bytes:
        """The bytes that follow a line."""
        assert self._process.stdout is not None, "it is a pipe"
        data = self._process.stdout.read(count)
        if len(data) < count:
            raise RefusedError("it cannot be decoded within bounds")
        return data
