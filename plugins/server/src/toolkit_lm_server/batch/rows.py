"""OpenAI's batch format: a request per line of the input, an answer per line of the output."""

from __future__ import annotations

import codecs
import os
import uuid
from collections.abc import Iterator
from hashlib import blake2b
from typing import IO, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Raw, Struct
from toolkit_lm.errors import ConfigError, in_plain_words

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/classify",
    "/pooling",
)
"""Routes that a row may ask. The server's other routes have no use in a file."""


class Row(Struct):
    """A request. Its body goes to the server as it stands."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: Raw
    line: int = 0
    """The row's number in the file."""
    size: int = 0
    """Bytes of the row's line."""


class Unreadable(NamedTuple):
    """A line that does not hold a request."""

    line: int
    size: int
    reason: str
    custom_id: str | None = None


class Answer(NamedTuple):
    """A server's answer to a row."""

    status: int
    request_id: str
    content: bytes
    ignored: str = ""
    """Names of the row's fields that were ignored, with commas between them."""


class _Body(Struct):
    stream: Any = None


class _Named(Struct):
    custom_id: str | None = None


class _WrittenError(Struct):
    line: int | None = None


class _Written(Struct):
    """A row of an output."""

    custom_id: str | None
    error: _WrittenError | None = None


class _Problem(Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _Problems(Struct):
    error: _Problem | None = None


def read_rows(file: IO[bytes], most: int) -> Iterator[Row | Unreadable]:
    """The lines of a file that are not blank. A line of more than `most` bytes is not kept."""
    number = 0
    while line := file.readline(most + 1):
        number += 1
        size = len(line)
        if size > most and not line.endswith(b"\n"):
            while (rest := file.readline(most)) and not rest.endswith(b"\n"):
                size += len(rest)
            yield Unreadable(
                number, size + len(rest), f"it has more than {most} bytes (max_body_size)."
            )
            continue
        line = line.removeprefix(codecs.BOM_UTF8).strip() if number == 1 else line.strip()
        if line:
            yield _row(line, number, size)


def _row(line: bytes, number: int, size: int) -> Row | Unreadable:
    try:
        row = msgspec.json.decode(line, type=Row)
        row.line = number
        row.size = size
        if row.url not in ROUTES:
            raise msgspec.ValidationError(f"url {row.url[:100]!r} is none of {', '.join(ROUTES)}")
        if not bytes(row.body).lstrip().startswith(b"{"):
            raise msgspec.ValidationError("its body must be an object")
        if msgspec.json.decode(row.body, type=_Body).stream:
            raise msgspec.ValidationError(
                "its body asks for a stream, which has no place in a file"
            )
    except msgspec.ValidationError as error:
        return Unreadable(number, size, f"it is no request: {_why(error)}", _custom_id(line))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Unreadable(number, size, f"it is not JSON: {error}.")
    return row


def _why(error: Exception) -> str:
    return in_plain_words(error, "the row").removeprefix("the row: ")


def _custom_id(line: bytes) -> str | None:
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def answer_line(row: Row, answer: Answer) -> bytes:
    """The output's line for an answer whose JSON is in one line."""
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": Raw(answer.content),
    }
    return _line(row.custom_id, response, _problem(answer) if answer.status >= 400 else None)


def unreadable_line(row: Unreadable) -> bytes:
    """The output's line for a line of the input that does not hold a request."""
    return _line(
        row.custom_id,
        None,
        {"code": "invalid_row", "message": f"line {row.line}: {row.reason}", "line": row.line},
    )


def _line(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> bytes:
    whole = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(whole) + b"\n"


def _problem(answer: Answer) -> dict[str, Any]:
    """An answer's failure in the row itself, where programs look for it."""
    try:
        problem = msgspec.json.decode(answer.content, type=_Problems).error or _Problem()
    except msgspec.DecodeError:
        problem = _Problem()
    code = problem.code if isinstance(problem.code, str) else None
    return {"code": code or problem.type or str(answer.status), "message": problem.message}


class Answered:
    """The rows that an output holds already. It keeps 16 bytes of each id in a set, and the numbers
    of lines without a request."""

    def __init__(self) -> None:
        self._ids: set[bytes] = set()
        self._unreadable: set[int] = set()

    @classmethod
    def of(cls, file: IO[bytes], name: str) -> Answered:
        """Reads an output, and cuts off an unfinished last line. Raises ConfigError for a file that
        is not an output."""
        self = cls()
        end = 0
        number = 0
        while line := file.readline():
            number += 1
            try:
                found = msgspec.json.decode(line, type=_Written)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if line.endswith(b"\n"):
                    raise ConfigError(
                        f"option 'output': line {number} of {name!r} is no row of an output: "
                        f"{error}"
                    ) from None
                file.truncate(end)
                break
            end += len(line)
            self._add(found)
            if not line.endswith(b"\n"):
                file.seek(end)
                file.write(b"\n")
        file.seek(0, os.SEEK_END)
        return self

    def _add(self, row: _Written) -> None:
        if row.error is not None and row.error.line is not None:
            # Its line may have been mended.
            self._unreadable.add(row.error.line)
        elif row.custom_id is not None:
            self._ids.add(_digest(row.custom_id))

    def __contains__(self, row: Row | Unreadable) -> bool:
        return (
            row.line in self._unreadable
            if isinstance(row, Unreadable)
            else _digest(row.custom_id) in self._ids
        )


def _digest(custom_id: str) -> bytes:
    return blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
