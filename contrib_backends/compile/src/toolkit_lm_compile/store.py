"""The compile cache on disk: one folder per key and rank, which is complete or absent."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import hashlib
import logging
import os
import pwd
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import platformdirs
from msgspec import Struct, field
from toolkit_lm.errors import ConfigError

from toolkit_lm_compile.split import ForwardPlan

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = "toolkit_lm compile cache 2"
"""Format of the manifests. Entries of another format are not read."""
_STAGED = ".staged-"
_WAYS_OUT = "Name another folder in compilation_config (cache_dir), or use compile_cache=False."


class FileRecord(Struct, frozen=True, array_like=True):
    """Size and digest of a file at the time it was written."""

    size: int
    """Size in bytes."""
    digest: str
    """SHA-256 of the contents."""

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """The record of a file as it is now."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())

    def differs(self, path: Path) -> str | None:
        """Why a file differs from the one that was written. None: it does not.

        The file is read only if its size is right.
        """
        if path.is_symlink() or not path.is_file():
            return "it is no file"
        if (size := path.stat().st_size) != self.size:
            return f"it has {size} bytes, not {self.size}"
        return None if FileRecord.of(path) == self else "its content has changed"


class Manifest(Struct, frozen=True, kw_only=True):
    """Contents of a rank's folder."""

    model: str
    """The architecture, and other details that tell entries apart for a reader."""
    ingredients: dict[str, str]
    """Digests of the key's ingredients by name."""
    sources: dict[str, str]
    """SHA-256 of each traced module, by name."""
    plans: list[ForwardPlan]
    bands: list[str] = field(default_factory=list)
    """Bands of numbers of tokens that have their own code."""
    instructions: dict[str, str] = field(default_factory=dict)
    """g++'s flags by name of the vector instruction sets that the compiling machine had."""
    files: dict[str, FileRecord] = field(default_factory=dict)
    """Records of the files, by their path in the folder."""
    format: str = ""

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Key and place of each compiled part. The place is "any" or a band of numbers of
        tokens."""
        paths = [Path(name).parts for name in self.files]
        return sorted(
            {(path[1], path[2]) for path in paths if len(path) > 3 and path[0] == "parts"}
        )


class DamagedError(Exception):
    """The contents of a cache folder differ from its manifest."""


def default_root() -> Path:
    """The user's cache folder."""
    return Path(platformdirs.user_cache_dir("toolkit_lm")) / "compile"


def open_root(root: Path) -> Path:
    """Makes the cache folder, for its user alone.

    Raises ConfigError if it cannot be made, or if others may write to it.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_writable = os.access(root, os.W_OK | os.X_OK)
    except OSError as error:
        raise ConfigError(
            f"the compile cache {str(root)!r} cannot be made: {error.strerror}. {_WAYS_OUT}"
        ) from error
    if not is_writable:
        raise ConfigError(f"the compile cache {str(root)!r} cannot be written. {_WAYS_OUT}")
    for folder in (root, *_parents_within(root)):
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"the compile cache {str(folder)!r} can be written by others, and what it holds "
                "is run as code. "
                f"Make it yours alone (chmod 700). {_WAYS_OUT}"
            )
    for folder in root.resolve().parents:
        if (who := _who_may_replace(folder.stat())) is not None:
            way_out = (
                f"`chmod g-w {shlex.quote(str(folder))}` takes that from the group. "
                if who.startswith("its group")
                else ""
            )
            raise ConfigError(
                f"the compile cache {str(root)!r} lies in {str(folder)!r}, where {who} may put "
                "another in its place, and what it holds "
                f"is run as code. {way_out}{_WAYS_OUT}"
            )
    return root


def _who_may_replace(status: os.stat_result) -> str | None:
    """Which other user may replace a folder inside this one. None: only the system's
    administrator."""
    if status.st_uid not in (0, os.getuid()) and not _is_outside(status.st_uid):
        return f"its owner, {_user_name(status.st_uid)},"
    if status.st_mode & stat.S_ISVTX:
        # There, only who owns a folder, or this one, may rename it.
        return None
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    is_shared = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    return f"its group ({_group_name(status.st_gid)})" if is_shared else None


def _is_own_group(group: int) -> bool:
    """Whether a group has no members but this user and the system's administrator.

    That a process runs with a group does not show it. A service may run with a shared group such as
    video.
    """
    if group == 0:
        return True
    user = _user_name(os.getuid())
    try:
        name, _, _, members = grp.getgrgid(group)
    except KeyError:
        # The machine knows nobody who is in it: who has started this process has given it the
        # group, as Kubernetes its fsGroup.
        return group in (os.getgid(), *os.getgroups())
    # Who has it as the group of the login is not listed: its name tells the private group of a
    # user.
    return name == user and set(members) <= {user}


def _is_outside(user: int) -> bool:
    """Whether `user` stands for all users outside the container, such as the system's
    administrator."""
    try:
        mapped = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except OSError:
        return False
    return user == overflow and mapped != ["0", "0", str(2**32 - 1)]


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _parents_within(root: Path) -> Iterator[Path]:
    """The folders directly below the root, through which entries' paths go."""
    for entry in root.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            yield entry


class Entry:
    """The folder of one key and rank."""

    def __init__(self, root: Path, key: str, rank: str) -> None:
        self.key = key
        self.parent = root / key
        self.folder = self.parent / rank
        self._lock = self.parent / f".{rank}.lock"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the entry. Waits for another process that is writing it. The system releases the
        lock of a process that dies."""
        self.parent.mkdir(mode=0o700, exist_ok=True)
        with self._lock.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("another process compiles the same model: waiting for what it makes")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def read(self) -> Manifest | None:
        """Reads the manifest, and compares each file with it. None: there is no entry. Raises
        DamagedError."""
        if not self.folder.is_dir():
            return None
        try:
            manifest = msgspec.json.decode((self.folder / MANIFEST).read_bytes(), type=Manifest)
        except (OSError, msgspec.MsgspecError) as error:
            raise DamagedError(f"its manifest: {error}") from error
        if manifest.format != FORMAT:
            raise DamagedError(f"its format {manifest.format!r} is not {FORMAT!r}")
        for name, record in manifest.files.items():
            if name.startswith("/") or ".." in name.split("/"):
                raise DamagedError(f"its file {name} lies elsewhere")
            if (reason := record.differs(self.folder / name)) is not None:
                raise DamagedError(f"its file {name}: {reason}")
        return manifest

    @contextlib.contextmanager
    def staged(self) -> Iterator[Path]:
        """A new folder to write into, under the lock. Leftovers of dead processes are removed."""
        for old in self.parent.glob(f"{_STAGED}*"):
            shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_STAGED, dir=self.parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, staged: Path, manifest: Manifest) -> None:
        """Makes a written folder the entry, atomically."""
        files = {
            path.relative_to(staged).as_posix(): FileRecord.of(path)
            for path in sorted(staged.rglob("*"))
            if path.is_file()
        }
        (staged / MANIFEST).write_bytes(
            msgspec.json.format(
                msgspec.json.encode(msgspec.structs.replace(manifest, files=files, format=FORMAT))
            )
        )
        for path in (*staged.rglob("*"), staged):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        self.discard()
        staged.rename(self.folder)

    def discard(self) -> None:
        """Deletes the entry."""
        if self.folder.exists():
            aside = Path(tempfile.mkdtemp(prefix=_STAGED, dir=self.parent))
            self.folder.rename(aside / "old")
            shutil.rmtree(aside, ignore_errors=True)
