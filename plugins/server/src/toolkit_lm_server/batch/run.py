"""Runs a batch with a bounded number of rows under way. Each answer is written as soon as it
comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Protocol

import msgspec

from toolkit_lm_server.batch.rows import (
    Answer,
    Answered,
    Row,
    Unreadable,
    answer_line,
    unreadable_line,
)
from toolkit_lm_server.threads import in_thread

_MOST_NAMES = 64
"""Most names of ignored fields that are told."""


class Answers(Protocol):
    async def ask(self, row: Row) -> Answer: ...


@dataclass
class Counts:
    """Counts of a batch's rows, by how they ended."""

    done: int = 0
    refused: int = 0
    """Rows that were answered with an error."""
    unreadable: int = 0
    skipped: int = 0
    """Rows that the output held already."""
    bytes: int = 0
    """Bytes of the input's lines that are done."""
    ignored: dict[str, None] = field(default_factory=dict)
    """Names of fields that were ignored in any row."""

    def ignore(self, names: str) -> None:
        """Adds names of ignored fields, which are separated by commas."""
        if names and len(self.ignored) < _MOST_NAMES:
            self.ignored |= dict.fromkeys(names.split(", "))


async def run_rows(
    rows: Iterator[Row | Unreadable],
    target: Answers,
    output: IO[bytes],
    *,
    concurrency: int,
    answered: Answered,
    on_row: Callable[[Counts], object] = lambda _: None,
) -> Counts:
    """Asks for all rows but those that are `answered`. Memory holds no more rows than are under
    way.

    Raises the errors of `target.ask`. The rows under way are then given up. Rows that are written
    remain.
    """
    counts = Counts()
    reading = asyncio.Lock()

    async def next_row() -> Row | Unreadable | None:
        async with reading:
            # A pipe may have nothing to read for long, while answers come.
            return await asyncio.wrap_future(in_thread(partial(next, rows, None)))

    async def work() -> None:
        while (row := await next_row()) is not None:
            if isinstance(row, Unreadable):
                counts.unreadable += 1
                if row not in answered:
                    _write(output, unreadable_line(row))
            elif row in answered:
                counts.skipped += 1
            else:
                answer = _as_json(await target.ask(row))
                counts.done += 1
                counts.ignore(answer.ignored)
                counts.refused += answer.status >= 400
                _write(output, answer_line(row, answer))
            counts.bytes += row.size
            on_row(counts)

    tasks = [asyncio.ensure_future(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return counts


def _as_json(answer: Answer) -> Answer:
    """The answer with its JSON in one line, however the server lays it out. It becomes an error
    where the content is not JSON."""
    try:
        return answer._replace(content=msgspec.json.format(answer.content, indent=-1))
    except msgspec.DecodeError:
        text = answer.content[:1000].decode(errors="replace")
        problem = {
            "error": {"message": f"The answer is not JSON: {text}", "code": "invalid_answer"}
        }
        return Answer(502, answer.request_id, msgspec.json.encode(problem))


def _write(output: IO[bytes], line: bytes) -> None:
    """Writes a line at once and whole, so that it survives the process."""
    output.write(line)
    output.flush()
