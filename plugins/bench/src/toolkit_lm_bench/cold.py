"""Files out of the page cache, as far as an ordinary user can."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from toolkit_lm.errors import UnsupportedError


def drop_pages(files: Iterable[Path]) -> None:
    """Drops what the page cache holds of files; pages that a process has mapped stay. Raises
    UnsupportedError where none can."""
    if not hasattr(os, "posix_fadvise"):
        raise UnsupportedError(
            f"{sys.platform} cannot drop files from the page cache, so no cold start can be "
            "measured. Supported: Linux."
        )
    for file in files:
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError:
            # A file that cannot be read, or that has gone, is not read by what is measured.
            continue
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def package_files() -> Iterator[Path]:
    """The files below the folders that Python imports from."""
    for folder in map(Path, filter(None, sys.path)):
        if folder.is_dir():
            yield from (path for path in folder.rglob("*") if path.is_file())
