"""The folder of files and batches: what it holds, and how much it may hold."""

from __future__ import annotations

import fcntl
import logging
import os
import uuid
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from toolkit_lm.config import parse_memory
from toolkit_lm.errors import ConfigError, ToolkitError
from toolkit_lm_server.errors import ApiError

from toolkit_lm_batches import Options
from toolkit_lm_batches.records import OPEN, Batch, File, epoch

logger = logging.getLogger(__name__)

DAYS_30 = 30 * 24 * 3600
"""Seconds that files are kept unless a request says otherwise, and batches always."""
_SHARE = 7 / 8
RecordT = TypeVar("RecordT", File, Batch)


class StorageFullError(ToolkitError):
    """The folder has no more room for a client."""


class Records(Generic[RecordT]):
    """Records of one kind, each in a JSON file of its own. They are written whole or not at all."""

    def __init__(self, folder: Path, kind: type[RecordT]) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self._kind: type[RecordT] = kind
        self.all: dict[str, RecordT] = {}
        """Records by id, the oldest first."""

    def load(self) -> None:
        """Reads the folder. What is not a record is left out, and told in the log."""
        found: list[RecordT] = []
        for path in self.folder.glob("*.json"):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=self._kind)
            except (OSError, msgspec.DecodeError) as error:
                logger.warning("batches: %s is left out: %s", path, error)
                continue
            if record.id == path.stem:
                found.append(record)
        found.sort(key=lambda record: (record.created_at, record.id))
        self.all = {record.id: record for record in found}

    def save(self, record: RecordT) -> None:
        """Writes a record, in place of an earlier state."""
        path = self.path(record.id, "json")
        new = path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        self.all[record.id] = record

    def drop(self, name: str) -> None:
        """Forgets a record, with what lies beside it."""
        self.all.pop(name, None)
        for path in self.folder.glob(f"{name}.*"):
            path.unlink(missing_ok=True)

    def path(self, name: str, kind: str) -> Path:
        return self.folder / f"{name}.{kind}"

    def of(self, owner: str) -> list[RecordT]:
        """An owner's records, the oldest first."""
        return [record for record in self.all.values() if record.owner == owner]

    def find(self, name: str, owner: str) -> RecordT | None:
        """A record, for its owner alone. Others do not learn that it exists."""
        record = self.all.get(name)
        return record if record is not None and record.owner == owner else None


class Store:
    """The files and batches of all clients. Only the event loop changes what is listed. One server
    uses the folder at a time."""

    def __init__(self, options: Options) -> None:
        assert options.folder is not None
        self._root = Path(options.folder).expanduser()
        self._options = options
        self._most_bytes = int(parse_memory(options.max_bytes))
        self.files = Records(self._root / "files", File)
        self.batches = Records(self._root / "batches", Batch)
        self._reserved: Counter[str] = Counter()
        """Bytes that owners have, in files and in what is being written."""
        self._lock: int | None = None

    @property
    def is_open(self) -> bool:
        return self._lock is not None

    def open(self) -> None:
        """Reads the folder. Raises ConfigError where another server uses it."""
        if self._lock is not None:
            return
        lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise ConfigError(
                f"batches.folder: {str(self._root)!r} is in use by another server. Give each "
                "server a folder of its own."
            ) from error
        self._lock = lock
        self._reserved.clear()
        self.files.load()
        self.batches.load()
        for file in self.files.all.values():
            self._reserved[file.owner] += file.bytes

    def close(self) -> None:
        """Leaves the folder to another server."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def room(self, owner: str) -> int:
        """Bytes that an owner may still write."""
        others = self._reserved.total() - self._reserved[owner]
        return int((self._most_bytes - others) * _SHARE) - self._reserved[owner]

    def reserve(self, owner: str, size: int) -> None:
        """Takes room for a file. Raises ApiError (400) where there is none."""
        if size > (room := self.room(owner)):
            raise ApiError(
                400,
                f"the file has {size:,} bytes, and there is room for {max(room, 0):,}: delete "
                "files, or ask the operator for more (batches.max_bytes).",
                param="file",
                code="storage_full",
            )
        self._reserved[owner] += size

    def count(self, owner: str, size: int) -> None:
        """Counts a file of results, for which the worker looked whether there is room."""
        self._reserved[owner] += size

    def release(self, owner: str, size: int) -> None:
        self._reserved[owner] -= size

    def check_number(self, records: Records[Any], owner: str, kind: str) -> None:
        """Raises ApiError (400) for one more record than an owner may have."""
        own = len(records.of(owner))
        others = len(records.all) - own
        if own + 1 > max(int((self._options.max_files - others) * _SHARE), 1):
            raise ApiError(
                400,
                f"there is no room for more {kind}: delete some, or ask the operator for more "
                "(batches.max_files).",
                code="storage_full",
            )

    def new_file(
        self, owner: str, filename: str, purpose: str, size: int, seconds: int = DAYS_30
    ) -> File:
        """A record for content that lies in place already, or will. Its bytes are reserved."""
        now = epoch()
        return File(
            id=f"file-{uuid.uuid4().hex}",
            owner=owner,
            filename=filename,
            purpose="batch" if purpose == "batch" else "batch_output",
            bytes=size,
            created_at=now,
            expires_at=now + seconds,
        )

    def content(self, name: str) -> Path:
        """The path of a file's content."""
        return self.files.path(name, "data")

    def part(self, batch: str) -> Path:
        """The path of a batch's answers so far."""
        return self.batches.path(batch, "part")

    def drop_file(self, file: File) -> None:
        self.release(file.owner, file.bytes)
        self.files.drop(file.id)

    def expire(self) -> None:
        """Forgets files whose time is over, and old batches that have no work left."""
        now = epoch()
        used = {batch.input_file_id for batch in self.open_batches()}
        for file in [*self.files.all.values()]:
            if file.expires_at <= now and file.id not in used:
                self.drop_file(file)
        for batch in [*self.batches.all.values()]:
            if batch.status not in OPEN and batch.created_at + DAYS_30 <= now:
                self.batches.drop(batch.id)

    def open_batches(self) -> Iterable[Batch]:
        """Batches with work left, the oldest first."""
        return [batch for batch in self.batches.all.values() if batch.status in OPEN]
