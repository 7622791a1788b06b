"""Archives of entries of the compile cache, for machines of the same kind."""

from __future__ import annotations

import contextlib
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolkit_lm.errors import ConfigError

from toolkit_lm_compile.store import MANIFEST, DamagedError, Entry, open_root

MOST_BYTES = 2**32
"""Of an archive's files together."""
MOST_FILES = 2**16
_LONGEST_NAME = 500
_ENTRY = re.compile(r"[0-9a-f]{32}/rank_[0-9]{1,4}_[0-9]{1,4}")
"""The folder of an entry: its key, and the rank."""


def write_archive(archive: Path, folders: Sequence[Path]) -> None:
    """Writes what the manifests of entries name, and nothing of who wrote them. Raises DamagedError and OSError; no half is left."""
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
                        tar.add(entry.folder / name, f"{entry.key}/{entry.folder.name}/{name}", recursive=False, filter=_of_nobody)
        aside.replace(archive)
    finally:
        aside.unlink(missing_ok=True)


def read_archive(archive: Path, root: Path) -> list[str]:
    """Puts the entries of an archive into the cache at `root`, all or none, and gives their keys.

    Raises ConfigError for an archive that cannot be read or is too large, whose files would lie elsewhere or are no plain files, and whose
    entries are damaged, of another format, or hold what their manifests do not name.
    """
    with tempfile.TemporaryDirectory(prefix=".import-", dir=root) as scratch:
        with _errors_of(archive), tarfile.open(archive) as tar:
            for member in _checked(archive, tar):
                tar.extract(member, scratch, filter="data")
        folders = sorted(one.parent for one in Path(scratch).glob(f"*/*/{MANIFEST}"))
        if not folders:
            raise ConfigError(f"{archive} holds no entry of the compile cache.")
        for folder in folders:
            _check(archive, folder)
        for folder in folders:
            entry = Entry(root, folder.parent.name, folder.name)
            with entry.locked():
                entry.discard()
                folder.rename(entry.folder)
    open_root(root)
    return sorted({folder.parent.name for folder in folders})


def _of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    return member.replace(uid=0, gid=0, uname="", gname="", mode=0o600, mtime=0, deep=False)


@contextlib.contextmanager
def _errors_of(archive: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, OSError, EOFError, zlib.error, UnicodeError) as error:
        raise ConfigError(f"{archive} cannot be read: {error or type(error).__name__}") from error


def _checked(archive: Path, tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members, each before it is read any further."""
    num_bytes = 0
    for num_files, member in enumerate(tar):
        shown = member.name[:_LONGEST_NAME]
        if not (member.isreg() or member.isdir()):
            raise ConfigError(f"{archive} holds {shown!r}, which is neither a file nor a folder: a link, or a device.")
        num_bytes += member.size
        if num_bytes > MOST_BYTES or num_files >= MOST_FILES or len(member.name) > _LONGEST_NAME:
            raise ConfigError(f"{archive} holds more than an entry of the compile cache does: at {shown!r}.")
        path = Path(member.name)
        entry = "/".join(path.parts[:2])
        if path.is_absolute() or ".." in path.parts or not _ENTRY.fullmatch(entry):
            if member.isdir() and len(path.parts) == 1 and _ENTRY.fullmatch(f"{path}/rank_0_0"):
                continue
            raise ConfigError(f"{archive} holds {shown!r}, which is no path in an entry of the compile cache (KEY/rank_0_0/...).")
        if not member.isdir():
            yield member


def _check(archive: Path, folder: Path) -> None:
    try:
        manifest = Entry(folder.parent.parent, folder.parent.name, folder.name).read()
    except DamagedError as error:
        raise ConfigError(f"{archive} is damaged, or of another version: {error}") from error
    assert manifest is not None
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST and name not in manifest.files:
            raise ConfigError(f"{archive} holds {name!r}, which its manifest does not name.")
