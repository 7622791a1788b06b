"""Files and batches as they are kept, and as clients see them."""

from __future__ import annotations

import time
from typing import Any, Literal

from msgspec import Struct, field

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
"""States of batches that have work left."""
_MOMENTS: dict[Status, str] = {
    "in_progress": "in_progress_at",
    "finalizing": "finalizing_at",
    "completed": "completed_at",
    "failed": "failed_at",
    "expired": "expired_at",
    "cancelling": "cancelling_at",
    "cancelled": "cancelled_at",
}


def epoch() -> int:
    """Seconds since 1970: times of records are dates that outlive the server."""
    return int(time.time())


class File(Struct, kw_only=True):
    """A file that a client has uploaded, or that a batch has made."""

    id: str
    owner: str
    """The client that alone may see it."""
    filename: str
    purpose: Literal["batch", "batch_output"]
    bytes: int
    created_at: int
    """Seconds since 1970, like all times here."""
    expires_at: int

    def shown(self) -> dict[str, Any]:
        """The file, as OpenAI's API shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class Tally(Struct):
    """Numbers of requests."""

    total: int = 0
    completed: int = 0
    """Requests that succeeded."""
    failed: int = 0
    """Requests with an error."""


class LineError(Struct):
    """An error in the input of a batch."""

    code: str
    message: str
    line: int | None
    param: str | None = None


class Batch(Struct, kw_only=True):
    """A file of requests that are answered in the background."""

    id: str
    owner: str
    """The client that alone may see it, and whose limits hold."""
    has_key: bool
    """The owner is the name of an API key."""
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    output_seconds: int
    """Seconds that files with results are kept."""
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    moments: dict[str, int] = field(default_factory=dict)
    """Times of changes of the status, by the field that shows them."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[LineError] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    def turn(self, status: Status, now: int) -> None:
        """Changes the status."""
        self.status = status
        if status in _MOMENTS:
            self.moments[_MOMENTS[status]] = now

    def shown(self) -> dict[str, Any]:
        """The batch, as OpenAI's API shows it."""
        errors = [
            {"code": e.code, "message": e.message, "line": e.line, "param": e.param}
            for e in self.errors
        ]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: self.moments.get(name) for name in _MOMENTS.values()},
            "request_counts": {
                "total": self.tally.total,
                "completed": self.tally.completed,
                "failed": self.tally.failed,
            },
            "metadata": self.metadata,
        }
