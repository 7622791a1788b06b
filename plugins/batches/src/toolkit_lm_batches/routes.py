"""The routes /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import FileResponse
from toolkit_lm_server.answer_schemas import answers
from toolkit_lm_server.errors import ApiError, described, printable
from toolkit_lm_server.pages import After, InOrder, Limit, page_of
from toolkit_lm_server.route import caller_of

from toolkit_lm_batches import Options
from toolkit_lm_batches.records import OPEN, Batch, File, epoch
from toolkit_lm_batches.schemas import (
    BatchBody,
    BatchList,
    BatchObject,
    DeletedFile,
    FileForm,
    FileList,
    FileObject,
)
from toolkit_lm_batches.store import DAYS_30, Store
from toolkit_lm_batches.worker import Worker

if TYPE_CHECKING:
    from toolkit_lm_server.plugin_routes import OpenAIApi

_WINDOW = 24 * 3600
_LONGEST_NAME = 200
Purpose = Annotated[
    Literal["batch", "batch_output"] | None, Query(description="The use of the files to list.")
]
FileLimit = Annotated[int, Query(ge=1, le=10_000, description="Most files of a page.")]


class Files:
    """Files of clients. Each is known to its owner alone."""

    def __init__(self, store: Store, worker: Worker) -> None:
        self._store = store
        self._worker = worker

    async def create(
        self, form: Annotated[FileForm, Form(media_type="multipart/form-data")], request: Request
    ) -> dict[str, Any]:
        """Keeps a file of requests."""
        await self._worker.start()
        self._store.expire()
        owner = caller_of(request).client
        size = form.file.size or 0
        self._store.check_number(self._store.files, owner, "files")
        self._store.reserve(owner, size)
        name = printable(form.file.filename or "", _LONGEST_NAME)
        seconds = form.expires_after_seconds or DAYS_30
        file = self._store.new_file(owner, name, "batch", size, seconds)
        try:
            await asyncio.to_thread(_write, form.file.file, self._store.content(file.id))
            self._store.files.save(file)
        except BaseException:
            self._store.release(owner, size)
            self._store.files.drop(file.id)
            raise
        return file.shown()

    async def list(
        self,
        request: Request,
        purpose: Purpose = None,
        limit: FileLimit = 10_000,
        after: After = None,
        order: InOrder = "desc",
    ) -> dict[str, Any]:
        """The client's files."""
        await self._worker.start()
        self._store.expire()
        found = self._store.files.of(caller_of(request).client)
        kept = [file.shown() for file in found if purpose in (None, file.purpose)]
        return page_of(kept, limit, after, order)

    async def get(self, file_id: str, request: Request) -> dict[str, Any]:
        """A file, without its content."""
        return (await self._found(file_id, request)).shown()

    async def content(self, file_id: str, request: Request) -> Response:
        """The content of a file."""
        file = await self._found(file_id, request)
        return FileResponse(self._store.content(file.id), media_type="application/octet-stream")

    async def delete(self, file_id: str, request: Request) -> dict[str, Any]:
        """Deletes a file, unless a batch needs it."""
        file = await self._found(file_id, request)
        if any(file.id == batch.input_file_id for batch in self._store.open_batches()):
            message = "file_id: a batch reads this file. Cancel the batch first."
            raise ApiError(400, message, param="file_id", code="file_in_use")
        self._store.drop_file(file)
        return {"id": file.id, "object": "file", "deleted": True}

    async def _found(self, name: str, request: Request) -> File:
        await self._worker.start()
        self._store.expire()
        found = self._store.files.find(name, caller_of(request).client)
        if found is None:
            raise _unknown("file", name)
        return found


class Batches:
    """Batches of clients. Each is known to its owner alone."""

    def __init__(self, store: Store, worker: Worker) -> None:
        self._store = store
        self._worker = worker

    async def create(self, body: BatchBody, request: Request) -> dict[str, Any]:
        """Begins to answer the requests of a file."""
        await self._worker.start()
        self._store.expire()
        caller = caller_of(request)
        if self._store.files.find(body.input_file_id, caller.client) is None:
            raise _unknown("file", body.input_file_id, "input_file_id", 400)
        self._store.check_number(self._store.batches, caller.client, "batches")
        now = epoch()
        seconds = body.output_expires_after.seconds if body.output_expires_after else DAYS_30
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            owner=caller.client,
            has_key=caller.key is not None,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            created_at=now,
            expires_at=now + _WINDOW,
            output_seconds=seconds,
            metadata=body.metadata,
        )
        self._store.batches.save(batch)
        self._worker.wake()
        return batch.shown()

    async def list(
        self, request: Request, limit: Limit = 20, after: After = None
    ) -> dict[str, Any]:
        """The client's batches, the newest first."""
        await self._worker.start()
        found = self._store.batches.of(caller_of(request).client)
        return page_of([batch.shown() for batch in found], limit, after, "desc")

    async def get(self, batch_id: str, request: Request) -> dict[str, Any]:
        """A batch, and how far it is."""
        return (await self._found(batch_id, request)).shown()

    async def cancel(self, batch_id: str, request: Request) -> dict[str, Any]:
        """Cancels a batch. What is answered already is kept."""
        batch = await self._found(batch_id, request)
        if batch.status not in OPEN:
            message = f"batch_id: a batch with the status {batch.status!r} cannot be cancelled."
            raise ApiError(400, message, param="batch_id")
        if batch.status in ("validating", "in_progress"):
            self._worker.cancel(batch)
        return batch.shown()

    async def _found(self, name: str, request: Request) -> Batch:
        await self._worker.start()
        found = self._store.batches.find(name, caller_of(request).client)
        if found is None:
            raise _unknown("batch", name)
        return found


def _write(source: IO[bytes], target: Path) -> None:
    with target.open("wb") as file:
        shutil.copyfileobj(source, file)


def _unknown(kind: str, name: str, param: str | None = None, status: int = 404) -> ApiError:
    message = f"No such {kind}: {printable(name)!r}. Each client sees its own."
    return ApiError(status, message, param=param or f"{kind}_id", code=f"{kind}_not_found")


def add_routes(
    router: APIRouter, options: Options, api: OpenAIApi
) -> Callable[[], AbstractAsyncContextManager[object]]:
    """Adds the routes. Returns their lifespan, in which batches are answered."""
    store = Store(options)
    worker = Worker(store, api, options)
    files = Files(store, worker)
    batches = Batches(store, worker)
    unknown = described(404)
    content: dict[int | str, dict[str, Any]] = {
        200: {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}
    }
    for method, path, handler, found in (
        ("POST", "/v1/files", files.create, answers(FileObject)),
        ("GET", "/v1/files", files.list, answers(FileList)),
        ("GET", "/v1/files/{file_id}", files.get, answers(FileObject) | unknown),
        ("GET", "/v1/files/{file_id}/content", files.content, content | unknown),
        ("DELETE", "/v1/files/{file_id}", files.delete, answers(DeletedFile) | unknown),
        ("POST", "/v1/batches", batches.create, answers(BatchObject)),
        ("GET", "/v1/batches", batches.list, answers(BatchList)),
        ("GET", "/v1/batches/{batch_id}", batches.get, answers(BatchObject) | unknown),
        ("POST", "/v1/batches/{batch_id}/cancel", batches.cancel, answers(BatchObject) | unknown),
    ):
        router.add_api_route(path, handler, methods=[method], response_model=None, responses=found)
    return worker.running
