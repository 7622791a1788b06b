"""A process that compiles grammars before anybody else does. What is written to break a compiler breaks this process, and no engine.

usage: python -m toolkit_lm_llguidance.trial SOURCE

Reads a job of JSON per line, and writes an answer per line: the error, "" where there is none. A job that takes too much kills it.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from llguidance import LLMatcher

from toolkit_lm_llguidance.grammars import grammar_of_schema
from toolkit_lm_llguidance.locating import locate
from toolkit_lm_llguidance.vocabulary import Source, Vocabulary, limits

SECONDS = 1.0
"""Of computing, for one grammar."""
MEMORY = 2**30
"""Bytes, for one grammar."""
_STACK = 2 * 2**20
"""Less than any thread has that compiles the grammar after this one."""
_STEPS = 16
"""Masks that are made, after tokens that are drawn at random: a grammar may become expensive on the way."""
_NOTHING = "nothing matches it"
_LENGTH = 700
"""Characters of an error."""


class Job(msgspec.Struct):
    grammar: str
    schema: dict[str, Any] | None = None
    """Of a grammar that was made of one."""
    options: dict[str, Any] | None = None
    """What else made it."""


def error_of(job: Job, vocabulary: Vocabulary) -> str:
    """Why a grammar cannot be used, "" where it can: it is compiled, and the first masks are made."""
    message = _error_of(job.grammar, vocabulary)
    if not message or job.schema is None:
        return _cut(message)

    end = time.process_time() + SECONDS / 4

    def of_part(schema: dict[str, Any]) -> str:
        return "" if time.process_time() > end else _error_of(grammar_of_schema(schema, job.options or {}), vocabulary)

    return f"{_cut(message)} (at {locate(job.schema, message, of_part)[:200]})"


def _error_of(grammar: str, vocabulary: Vocabulary) -> str:
    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits())
    generator = Random(0)  # nosec B311 # no secret
    for step in range(_STEPS):
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error().removesuffix("<non-verbose/>").strip().replace("NoExtensionBias", _NOTHING)
        token = _allowed(mask, vocabulary.source.eos_token_ids, generator)
        if token is None:
            return "" if step or any(mask) else _NOTHING
        matcher.consume_token(token)
    return ""


def _allowed(mask: bytes, eos_token_ids: Sequence[int], generator: Random) -> int | None:
    """One of the tokens that a mask allows, but for the last of a sequence."""
    start = generator.randrange(len(mask))
    for index in (*range(start, len(mask)), *range(start)):
        for bit in range(8 if mask[index] else 0):
            token: int = index * 8 + bit
            if mask[index] >> bit & 1 and token not in eos_token_ids:
                return token
    return None


def _cut(message: str) -> str:
    return message if len(message) <= _LENGTH else f"{message[: _LENGTH // 2]} ... {message[-_LENGTH // 2 :]}"


def main() -> None:
    vocabulary = Vocabulary.of(msgspec.json.decode(sys.argv[1], type=Source))
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
            answers[0] = error_of(job, vocabulary)

        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answers[0]), flush=True)


if __name__ == "__main__":
    main()
