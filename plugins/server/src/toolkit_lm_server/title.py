"""What lists of processes call this one."""

from __future__ import annotations

import os

from setproctitle import setproctitle

_KEEP = "SPT_NOENV"
"""Tells setproctitle to leave the environment where it is, which other programs read. Titles are no
longer than the arguments then."""


def set_title(title: str) -> None:
    """Names the process. Its arguments, which may hold a key, are not told any more."""
    os.environ[_KEEP] = "1"
    setproctitle(title)
    del os.environ[_KEEP]
