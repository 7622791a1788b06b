"""A process that compiles grammars before anybody else does. What is written to break a compiler
breaks this process, and no engine.

usage: python -m toolkit_lm_structured_output.trial COMPILER SOURCE

Reads a job of JSON per line, and writes an answer per line: the error, "" where there is none. A
job that takes too much kills it.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from toolkit_lm_structured_output.contract import Source, load_compiler

SECONDS = 1.0
"""Seconds of computing for one grammar."""
MEMORY = 2**30
"""Bytes, for one grammar."""
_STACK = 2 * 2**20
"""Less than any thread has that compiles the grammar after this one."""
_LENGTH = 700
"""Characters of an error."""


class Job(msgspec.Struct):
    grammar: str
    details: Any = None
    """Extra JSON for the trial, the same as Reading.details."""


def _cut(message: str) -> str:
    return (
        message
        if len(message) <= _LENGTH
        else f"{message[: _LENGTH // 2]} ... {message[-_LENGTH // 2 :]}"
    )


def main() -> None:
    compiler = load_compiler(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Source))
    # Not at the cost of the first grammar.
    _ = compiler.token_lengths
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, resource.RLIM_INFINITY))
    threading.stack_size(_STACK)
    answers = [""]
    print(flush=True)
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)

        def work(job: Job = job) -> None:
            answers[0] = _cut(compiler.error_of(job.grammar, job.details))

        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answers[0]), flush=True)


if __name__ == "__main__":
    main()
