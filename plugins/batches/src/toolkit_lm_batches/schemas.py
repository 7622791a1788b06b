"""Bodies and answers of /v1/files and /v1/batches."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field
from toolkit_lm_server.pages import PageEnds
from toolkit_lm_server.schema_texts import Described

from toolkit_lm_batches.records import Status

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Seconds = Annotated[int, Field(ge=3600, le=2_592_000)]
"""Times after which files expire: from an hour to 30 days."""
_Id = Annotated[str, Field(min_length=1, max_length=128)]
_Name = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class FileForm(BaseModel):
    """The form of POST /v1/files."""

    model_config = ConfigDict(extra="forbid")

    file: UploadFile
    """The file: requests in OpenAI's batch format, one a line."""
    purpose: Literal["batch"]
    """The use of the file."""
    expires_after_anchor: Annotated[
        Literal["created_at"] | None, Field(alias="expires_after[anchor]")
    ] = None
    """The time from which the seconds count."""
    expires_after_seconds: Annotated[Seconds | None, Field(alias="expires_after[seconds]")] = None
    """Seconds that the file is kept. null: 30 days."""


class ExpiresAfter(Described):
    model_config = ConfigDict(extra="forbid", strict=True)

    anchor: Literal["created_at"]
    """The time from which the seconds count: when the file is made."""
    seconds: Seconds
    """Seconds that the file is kept."""


class BatchBody(Described):
    """The body of POST /v1/batches."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input_file_id: _Id
    """The file with the requests."""
    endpoint: Endpoint
    """The route that all of its requests ask."""
    completion_window: Literal["24h"]
    """Time in which the batch is answered. What is left then has an error."""
    metadata: Annotated[dict[_Name, _Value], Field(max_length=16)] | None = None
    """Values that come back with the batch."""
    output_expires_after: ExpiresAfter | None = None
    """Time that files with results are kept. null: 30 days."""


class FileObject(Described):
    id: str
    """The file's id."""
    object: Literal["file"]
    """The kind of object."""
    bytes: int
    """The file's size."""
    created_at: int
    """Seconds since 1970."""
    expires_at: int
    """Time from which the file is gone, in seconds since 1970."""
    filename: str
    """The file's name, as the client gave it."""
    purpose: Literal["batch", "batch_output"]
    """The use of the file."""
    status: Literal["processed"]
    """Files can be used at once."""


class FileList(PageEnds):
    data: list[FileObject]
    """The files of the page."""


class DeletedFile(Described):
    id: str
    """The file's id."""
    object: Literal["file"]
    """The kind of object."""
    deleted: Literal[True]
    """The file is gone."""


class BatchError(Described):
    code: str
    """The kind of error."""
    message: str
    """The error in words."""
    line: int | None
    """The line of the input. null: the error is of the whole."""
    param: str | None
    """The field that is wrong."""


class BatchErrors(Described):
    object: Literal["list"]
    """The kind of object."""
    data: list[BatchError]
    """The first errors of the input, 100 at most."""


class RequestCounts(Described):
    total: int
    """Requests of the batch."""
    completed: int
    """Requests with an answer."""
    failed: int
    """Requests with an error."""


class BatchObject(Described):
    id: str
    """The batch's id."""
    object: Literal["batch"]
    """The kind of object."""
    endpoint: Endpoint
    """The route that all requests ask."""
    errors: BatchErrors | None
    """Errors that ended the batch."""
    input_file_id: str
    """The file with the requests."""
    completion_window: Literal["24h"]
    """Time in which the batch is answered."""
    status: Status
    """How far the batch is."""
    output_file_id: str | None
    """The file with the answers, once the batch has ended and there are any."""
    error_file_id: str | None
    """The file with the requests that failed, once the batch has ended and there are any."""
    created_at: int
    """Seconds since 1970, like all times here."""
    expires_at: int
    """Time at which the batch expires unless it has ended."""
    in_progress_at: int | None
    """Time at which the first request was sent."""
    finalizing_at: int | None
    """Time at which the last answer had come."""
    completed_at: int | None
    """Time at which the batch was completed."""
    failed_at: int | None
    """Time at which the batch failed."""
    expired_at: int | None
    """Time at which the batch expired."""
    cancelling_at: int | None
    """Time at which somebody cancelled it."""
    cancelled_at: int | None
    """Time at which the last request had been cancelled."""
    request_counts: RequestCounts
    """Numbers of requests."""
    metadata: dict[str, str] | None
    """The values of the request that made it."""


class BatchList(PageEnds):
    data: list[BatchObject]
    """The batches of the page."""
