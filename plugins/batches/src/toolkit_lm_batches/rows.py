"""Requests of a batch: how they are checked, asked, and sorted into files."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import httpx
import msgspec
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from toolkit_lm.errors import ToolkitError
from toolkit_lm_server.batch.rows import Answer, Answered, Row, Unreadable, read_rows
from toolkit_lm_server.caller import KEY, Caller
from toolkit_lm_server.route import REQUEST_ID
from toolkit_lm_server.unknown_fields import IGNORED

from toolkit_lm_batches.records import Batch, LineError, Tally

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServingEngine

_MOST_ERRORS = 100
"""Most errors in the input that are told."""
_BUSY = (429, 503)
"""Statuses that say nothing of the row. It is asked again."""
_LOOK = 0.05
"""Seconds between two looks at the engine's queue."""
_LONGEST_PAUSE = 30.0
_LOWEST = 2**62
"""The priority of rows, where the scheduling policy reads it: larger numbers come later."""


class _Outcome(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw(b"null")


def check_rows(
    path: Path, endpoint: str, most_rows: int, most_bytes: int
) -> tuple[int, list[LineError]]:
    """The number of a file's requests, and the errors among its lines. A file without requests, or
    with more than `most_rows`, is an error, too."""
    errors: list[LineError] = []
    ids: set[str] = set()
    total = 0

    def add(code: str, message: str, line: int | None, param: str | None = None) -> None:
        if len(errors) < _MOST_ERRORS:
            errors.append(LineError(code, message, line, param))

    with path.open("rb") as file:
        for row in read_rows(file, most_bytes):
            total += 1
            if total > most_rows:
                add("too_many_requests", f"a batch has at most {most_rows} requests.", None)
                break
            if isinstance(row, Unreadable):
                add("invalid_request", row.reason, row.line)
            elif row.url != endpoint:
                add("mismatched_endpoint", f"its url is not {endpoint}.", row.line, "url")
            elif row.custom_id in ids:
                add("duplicate_custom_id", "another line has its id.", row.line, "custom_id")
            else:
                ids.add(row.custom_id)
    if not total:
        add("empty_file", "the file has no requests.", None)
    return total, errors


class Rows:
    """Asks the server for the answers to rows, while no live request waits."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        engine: ServingEngine,
        slots: asyncio.Semaphore,
        name: str,
    ) -> None:
        """`slots`: places of rows of all batches. `name`: the owner, for errors."""
        self._client = client
        self._engine = engine
        self._slots = slots
        self._name = name
        policies = engine.plugins.scheduling_policies
        policy = engine.config.scheduler.policy
        self._has_priority = policies.get(policy).reads_priority

    async def ask(self, row: Row) -> Answer:
        """The answer to a row. Raises ToolkitError where the owner may ask nothing any more."""
        body = self._body(row)
        while True:
            async with self._slots:
                while self._engine.num_queued_tokens:
                    await asyncio.sleep(_LOOK)
                response = await self._client.post(row.url, content=body)
            if response.status_code == 401:
                raise ToolkitError(f"the API key {self._name!r} is not in use any more.")
            if response.status_code not in _BUSY:
                return Answer(
                    response.status_code,
                    response.headers.get(REQUEST_ID, ""),
                    response.content,
                    response.headers.get(IGNORED, ""),
                )
            after = response.headers.get("retry-after", "")
            pause = float(after) if after.isdecimal() and len(after) < 4 else 1.0
            await asyncio.sleep(min(pause, _LONGEST_PAUSE))

    def _body(self, row: Row) -> bytes:
        if not self._has_priority:
            return bytes(row.body)
        fields: dict[str, Any] = msgspec.json.decode(row.body)
        return msgspec.json.encode({**fields, "priority": _LOWEST})


@asynccontextmanager
async def asking(
    app: FastAPI, batch: Batch, engine: ServingEngine, slots: asyncio.Semaphore
) -> AsyncIterator[Rows]:
    """The server's routes, asked in this process on behalf of a batch's owner."""

    async def as_owner(scope: Scope, receive: Receive, send: Send) -> None:
        key = batch.owner if batch.has_key else None
        caller = Caller(uuid.uuid4().hex, batch.owner, key, on_behalf=True)
        await app({**scope, KEY: caller}, receive, send)

    transport = httpx.ASGITransport(as_owner, raise_app_exceptions=False)
    headers = {"content-type": "application/json"}
    # This transport knows no timeouts.
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers=headers
    ) as client:
        yield Rows(client, engine, slots, batch.owner)


def tally_of(part: IO[bytes]) -> Tally:
    """Counts of the rows of an output."""
    tally = Tally()
    part.seek(0)
    for line in part:
        if _has_failed(line):
            tally.failed += 1
        else:
            tally.completed += 1
    return tally


def sort_rows(part: Path, good: Path, bad: Path, rest: Iterable[bytes] = ()) -> tuple[int, int]:
    """Writes the rows of an output to two files, answers and errors, and `rest` to the second.
    Returns their sizes in bytes."""
    with good.open("wb") as answers, bad.open("wb") as errors:
        if part.exists():
            with part.open("rb") as file:
                for line in file:
                    (errors if _has_failed(line) else answers).write(line)
        errors.writelines(rest)
        return answers.tell(), errors.tell()


def expired_rows(source: Path, part: Path, most_bytes: int) -> Iterable[bytes]:
    """Errors of the rows that an output does not have."""
    answered = Answered()
    if part.exists():
        with part.open("r+b") as written:
            answered = Answered.of(written, str(part))
    error = {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    }
    with source.open("rb") as file:
        for row in read_rows(file, most_bytes):
            if isinstance(row, Row) and row not in answered:
                whole = {
                    "id": f"batch_req_{uuid.uuid4().hex}",
                    "custom_id": row.custom_id,
                    "response": None,
                    "error": error,
                }
                yield msgspec.json.encode(whole) + b"\n"


def _has_failed(line: bytes) -> bool:
    return bytes(msgspec.json.decode(line, type=_Outcome).error) != b"null"
