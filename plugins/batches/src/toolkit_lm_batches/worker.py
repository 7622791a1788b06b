"""The background work on batches: they are checked, answered row by row, and finished."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from toolkit_lm.errors import ToolkitError
from toolkit_lm_server.batch.rows import Answered, read_rows
from toolkit_lm_server.batch.run import Counts, run_rows

from toolkit_lm_batches import Options
from toolkit_lm_batches.records import Batch, File, LineError, Status, Tally, epoch
from toolkit_lm_batches.rows import asking, check_rows, expired_rows, sort_rows, tally_of
from toolkit_lm_batches.store import StorageFullError, Store

if TYPE_CHECKING:
    from toolkit_lm_server.plugin_routes import OpenAIApi

logger = logging.getLogger(__name__)

_LOOK = 60.0
"""Seconds between two looks for what has expired."""


class Worker:
    """Answers the batches of a store: one of each owner at a time, those of several owners side by
    side. What a server leaves unfinished, the next one goes on with."""

    def __init__(self, store: Store, api: OpenAIApi, options: Options) -> None:
        self._store = store
        self._api = api
        self._options = options
        self._slots = asyncio.Semaphore(options.concurrency)
        self._wake = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Work under way, by batch."""
        self._main: asyncio.Task[None] | None = None
        self._app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Works while the context lasts. Raises ConfigError where another server uses the
        folder."""
        await self.start()
        try:
            yield
        finally:
            await self.stop()

    async def start(self) -> None:
        """Begins to work, unless it does. Raises ConfigError as `running` does."""
        if self._main is None:
            self._store.open()
            self._slots = asyncio.Semaphore(self._options.concurrency)
            self._wake = asyncio.Event()
            self._app.router.routes = self._api.router.routes
            self._main = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Ends the work. Batches stay as they are on disk."""
        tasks = [*self._tasks.values(), *([self._main] if self._main else [])]
        self._main = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._store.close()

    def wake(self) -> None:
        """Has the worker look for work."""
        self._wake.set()

    def cancel(self, batch: Batch) -> None:
        """Cancels a batch that has work left. What is answered already is kept."""
        self._turn(batch, "cancelling")
        if (task := self._tasks.get(batch.id)) is not None:
            task.cancel()
        self.wake()

    async def _work(self) -> None:
        while True:
            self._store.expire()
            owners = {self._store.batches.all[name].owner for name in self._tasks}
            for batch in self._store.open_batches():
                if batch.owner not in owners:
                    owners.add(batch.owner)
                    self._begin(batch)
            with contextlib.suppress(TimeoutError):
                # wait_for may lose a cancellation that comes together with the event.
                async with asyncio.timeout(_LOOK):
                    await self._wake.wait()
            self._wake.clear()

    def _begin(self, batch: Batch) -> None:
        task = self._tasks[batch.id] = asyncio.create_task(self._advance(batch))

        def ended(_: object) -> None:
            self._tasks.pop(batch.id, None)
            self.wake()

        task.add_done_callback(ended)

    async def _advance(self, batch: Batch) -> None:
        """Works on a batch until it is finished, cancelled, or the server stops."""
        try:
            try:
                if batch.status == "cancelling":
                    await self._finish(batch, "cancelled")
                    return
                async with asyncio.timeout(max(batch.expires_at - epoch(), 0)):
                    await self._answer(batch)
            except asyncio.CancelledError:
                if batch.status != "cancelling":
                    raise
                await self._finish(batch, "cancelled")
            except TimeoutError:
                await self._finish(batch, "expired")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, ToolkitError | OSError):
                logger.exception("batches: the work on %s failed", batch.id)
            await self._fail(batch, error)

    async def _fail(self, batch: Batch, error: Exception) -> None:
        """Ends a batch with an error of the whole. What is answered already is kept."""
        message = str(error) if isinstance(error, ToolkitError) else "The server failed on it."
        batch.errors.append(LineError("batch_failed", message, None))
        try:
            await self._finish(batch, "failed")
        except Exception as again:
            logger.error("batches: %s cannot be finished: %s", batch.id, again)
            batch.turn("failed", epoch())

    async def _answer(self, batch: Batch) -> None:
        store = self._store
        source = store.content(batch.input_file_id)
        most_bytes = self._api.options.max_body_bytes
        if batch.status == "validating":
            total, errors = await asyncio.to_thread(
                check_rows, source, batch.endpoint, self._options.max_rows, most_bytes
            )
            batch.tally.total = total
            batch.errors = errors
            if errors:
                self._turn(batch, "failed")
                return
            self._turn(batch, "in_progress")
        part = store.part(batch.id)
        with source.open("rb") as requests, part.open("r+b" if part.exists() else "w+b") as output:
            answered = await asyncio.to_thread(Answered.of, output, str(part))
            before = await asyncio.to_thread(tally_of, output)
            self._count(batch, before, Counts())
            room = store.room(batch.owner)

            def watch(counts: Counts) -> None:
                self._count(batch, before, counts)
                if output.tell() > room:
                    raise StorageFullError(
                        "its answers have no more room: delete files, or ask the operator for more "
                        "(batches.max_bytes)."
                    )

            async with asking(self._app, batch, self._api.engines[None], self._slots) as rows:
                await run_rows(
                    read_rows(requests, most_bytes),
                    rows,
                    output,
                    concurrency=min(self._options.concurrency, batch.tally.total),
                    answered=answered,
                    on_row=watch,
                )
        await self._finish(batch, "completed")

    @staticmethod
    def _count(batch: Batch, before: Tally, counts: Counts) -> None:
        batch.tally.completed = before.completed + counts.done - counts.refused
        batch.tally.failed = before.failed + counts.refused

    async def _finish(self, batch: Batch, status: Status) -> None:
        """Makes the files of results, and sets the last status."""
        store = self._store
        part = store.part(batch.id)
        source = store.content(batch.input_file_id)
        if status == "completed":
            self._turn(batch, "finalizing")
        files = [
            store.new_file(batch.owner, f"{batch.id}_{kind}.jsonl", kind, 0, batch.output_seconds)
            for kind in ("output", "error")
        ]
        paths = [store.content(file.id) for file in files]
        rest = (
            expired_rows(source, part, self._api.options.max_body_bytes)
            if status == "expired" and source.exists()
            else ()
        )
        sizes = await asyncio.to_thread(sort_rows, part, paths[0], paths[1], rest)
        names = [self._keep(file, size) for file, size in zip(files, sizes, strict=True)]
        batch.output_file_id, batch.error_file_id = names
        if status == "expired":
            batch.tally.failed = batch.tally.total - batch.tally.completed
        self._turn(batch, status)
        part.unlink(missing_ok=True)

    def _keep(self, file: File, size: int) -> str | None:
        """Lists a file of results; none where it is empty. Returns its id."""
        if not size:
            self._store.content(file.id).unlink(missing_ok=True)
            return None
        file.bytes = size
        self._store.count(file.owner, size)
        self._store.files.save(file)
        return file.id

    def _turn(self, batch: Batch, status: Status) -> None:
        batch.turn(status, epoch())
        self._store.batches.save(batch)
