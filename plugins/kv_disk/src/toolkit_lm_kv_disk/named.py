"""NamedPrefixes: prefixes that have a name, whose blocks stay on disk. Needs no torch."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field

from toolkit_lm_kv_disk.segments import Key

logger = logging.getLogger(__name__)

MOST_NAMES = 1024
"""Most named prefixes of a folder."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names of prefixes: no path, and no hidden file."""
_FILE = "names.json"
_VERSION = 1


class Entry(Struct):
    """A named prefix."""

    created: float
    """Seconds since 1970."""
    num_tokens: int
    salt: str
    """Digest of the prefix's salt; empty: it has none."""
    keys: list[Key]


class _File(Struct):
    version: int = _VERSION
    entries: dict[str, Entry] = field(default_factory=dict)


class NamedPrefixes:
    """The named prefixes of a folder, kept in a file of it."""

    def __init__(
        self, folder: Path, most_bytes: int, bytes_of: Callable[[Key], int], *, writes: bool
    ) -> None:
        """`most_bytes`: of the blocks of all names. `writes`: nobody else writes to the folder. A
        file that cannot be read counts as none."""
        self._path = folder / _FILE
        self.most_bytes = most_bytes
        self._bytes_of = bytes_of
        self._writes = writes
        self.entries: dict[str, Entry] = {}
        self._counts: Counter[Key] = Counter()
        """Number of names that need each block."""
        self.num_bytes = 0
        """Bytes of the blocks that have a name."""
        # An engine that only reads keeps nothing.
        for name, entry in self._read().items() if writes else ():
            if self._grown(entry.keys) <= most_bytes:
                self._enter(name, entry)
            else:
                logger.warning("%s: no room for the named prefix %r", folder, name)

    def __contains__(self, key: Key) -> bool:
        return key in self._counts

    def add(self, name: str, num_tokens: int, salt: str, keys: Sequence[Key]) -> str | None:
        """Names a prefix, in place of one with the same name. Returns why it cannot be named."""
        if not self._writes:
            return "another engine writes to this folder, and names prefixes there"
        if name not in self.entries and len(self.entries) >= MOST_NAMES:
            return f"{MOST_NAMES} prefixes have names already: drop others"
        before = self._leave(name) if name in self.entries else None
        reason = None
        if (needed := self._grown(keys)) > self.most_bytes:
            reason = (
                f"named prefixes would take {needed} bytes on each rank, and may take "
                f"{self.most_bytes}: drop others, or give the folder more bytes"
            )
        else:
            self._enter(name, Entry(time.time(), num_tokens, salt, list(keys)))
            try:
                self._write()
            except OSError as error:
                self._leave(name)
                reason = f"{self._path} cannot be written: {error}"
        if reason is not None and before is not None:
            self._enter(name, before)
        return reason

    def drop(self, names: Sequence[str]) -> list[Key]:
        """Forgets names. Returns the blocks that have no name any more."""
        dropped = [key for name in names for key in self._leave(name).keys]
        if names:
            self._write()
        return [key for key in dict.fromkeys(dropped) if key not in self._counts]

    def _grown(self, keys: Sequence[Key]) -> int:
        """Bytes of the blocks that have a name, with these."""
        new = {key for key in keys if key not in self._counts}
        return self.num_bytes + sum(map(self._bytes_of, new))

    def _enter(self, name: str, entry: Entry) -> None:
        self.num_bytes = self._grown(entry.keys)
        self.entries[name] = entry
        self._counts.update(set(entry.keys))

    def _leave(self, name: str) -> Entry:
        entry = self.entries.pop(name)
        for key in set(entry.keys):
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                self.num_bytes -= self._bytes_of(key)
        return entry

    def _read(self) -> dict[str, Entry]:
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s: the names of prefixes are lost: %s", self._path, error)
            return {}
        if found.version != _VERSION:
            logger.warning("%s has version %d, and is not read", self._path, found.version)
            return {}
        return {name: entry for name, entry in found.entries.items() if NAME.fullmatch(name)}

    def _write(self) -> None:
        """Raises OSError, and the file is then as before."""
        data = msgspec.json.encode(_File(entries=self.entries))
        new = self._path.with_suffix(".new")
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        new.replace(self._path)
