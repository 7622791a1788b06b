"""Archives of entries of the compile cache, for machines of the same kind."""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from toolkit_lm.errors import ConfigError

from toolkit_lm_compile.store import MANIFEST, DamagedError, Entry, Manifest, open_root

MOST_BYTES = 2**32
"""Most bytes of an archive's files together."""
MOST_FILES = 2**16
_LONGEST_NAME = 500
_MOST_AT_ONCE = 2**16
"""Most bytes of one read. tarfile reads contents in smaller pieces, but each extended header
whole."""
_ENTRY = re.compile(r"[0-9a-f]{32}/rank_[0-9]{1,4}_[0-9]{1,4}")
"""The path of an entry's folder: its key, and its rank."""


def write_archive(archive: Path, folders: Sequence[Path]) -> None:
    """Writes the files that the entries' manifests name, without their owners.

    Raises DamagedError and OSError. A failure leaves no partial archive.
    """
    entries = [Entry(folder.parent.parent, folder.parent.name, folder.name) for folder in folders]
    aside = archive.with_name(f".{archive.name}.part")
    try:
        with tarfile.open(aside, "w:gz") as tar:
            for entry in entries:
                with entry.locked():
                    manifest = entry.read()
                    if manifest is None:
                        raise DamagedError("it is gone")
                    for name in (MANIFEST, *manifest.files):
                        tar.add(
                            entry.folder / name,
                            f"{entry.key}/{entry.folder.name}/{name}",
                            recursive=False,
                            filter=_anonymous,
                        )
        aside.replace(archive)
    finally:
        aside.unlink(missing_ok=True)


class Imported(NamedTuple):
    """Keys of the entries that an archive held, each list sorted."""

    taken: list[str]
    replaced: list[str]
    """Keys among `taken` whose earlier entry in the cache was deleted."""
    present: list[str]
    """Keys of entries that the cache had already and keeps."""


def read_archive(archive: Path, root: Path) -> Imported:
    """Puts the entries of an archive into the cache at `root`, all or none.

    Raises ConfigError for an archive that cannot be read or is too large. Raises it as well for
    files outside an entry's folder, links and devices. Raises it for entries that are damaged, of
    another format, or hold files that their manifests do not name.
    """
    with tempfile.TemporaryDirectory(prefix=".import-", dir=root) as scratch:
        with (
            _errors_of(archive),
            gzip.open(archive) as whole,
            tarfile.open(fileobj=_Pieces(whole), mode="r:") as tar,
        ):
            for member in _checked(archive, tar):
                tar.extract(member, scratch, filter="data")
        folders = sorted(manifest.parent for manifest in Path(scratch).glob(f"*/*/{MANIFEST}"))
        if not folders:
            raise ConfigError(f"{archive} holds no entry of the compile cache.")
        manifests = [_check(archive, folder) for folder in folders]
        found = Imported([], [], [])
        for folder, manifest in zip(folders, manifests, strict=True):
            _place(folder, manifest, root, found)
    open_root(root)
    return Imported(*(sorted(set(keys)) for keys in found))


def _place(folder: Path, manifest: Manifest, root: Path, found: Imported) -> None:
    """Moves a checked entry into the cache, and notes the outcome in `found`."""
    entry = Entry(root, folder.parent.name, folder.name)
    with entry.locked():
        with contextlib.suppress(DamagedError):
            if entry.read() == manifest:
                found.present.append(entry.key)
                return
        if entry.folder.exists():
            found.replaced.append(entry.key)
        entry.discard()
        folder.rename(entry.folder)
        found.taken.append(entry.key)


class _Pieces(io.BufferedIOBase):
    """An archive's stream for tarfile. It refuses reads larger than any that a valid archive
    needs."""

    def __init__(self, whole: gzip.GzipFile) -> None:
        self._whole = whole

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads `size` bytes. Raises tarfile.ReadError if that is too many."""
        if size is None or not 0 <= size <= _MOST_AT_ONCE:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._whole.read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._whole.seek(offset, whence)

    def tell(self) -> int:
        return self._whole.tell()


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    return member.replace(uid=0, gid=0, uname="", gname="", mode=0o600, mtime=0, deep=False)


@contextlib.contextmanager
def _errors_of(archive: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, OSError, EOFError, zlib.error, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{archive} cannot be read: {error or type(error).__name__}") from error


def _checked(archive: Path, tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yields the archive's files, each checked before its contents are read. Raises ConfigError."""
    num_bytes = 0
    for num_files, member in enumerate(tar):
        shown = member.name[:_LONGEST_NAME]
        if not (member.isreg() or member.isdir()):
            raise ConfigError(
                f"{archive} holds {shown!r}, which is neither a file nor a folder: a link, or a "
                "device."
            )
        num_bytes += member.size
        if num_bytes > MOST_BYTES or num_files >= MOST_FILES or len(member.name) > _LONGEST_NAME:
            raise ConfigError(
                f"{archive} holds more than an entry of the compile cache does: at {shown!r}."
            )
        path = Path(member.name)
        entry = "/".join(path.parts[:2])
        if path.is_absolute() or ".." in path.parts or not _ENTRY.fullmatch(entry):
            if member.isdir() and len(path.parts) == 1 and _ENTRY.fullmatch(f"{path}/rank_0_0"):
                continue
            raise ConfigError(
                f"{archive} holds {shown!r}, which is no path in an entry of the compile cache "
                "(KEY/rank_0_0/...)."
            )
        if not member.isdir():
            yield member


def _check(archive: Path, folder: Path) -> Manifest:
    try:
        manifest = Entry(folder.parent.parent, folder.parent.name, folder.name).read()
    except DamagedError as error:
        raise ConfigError(f"{archive} is damaged, or of another version: {error}") from error
    assert manifest is not None
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST and name not in manifest.files:
            raise ConfigError(f"{archive} holds {name!r}, which its manifest does not name.")
    return manifest
