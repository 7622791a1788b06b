"""The process's title in lists of processes."""

from __future__ import annotations

import os

from setproctitle import setproctitle

_KEEP = "SPT_NOENV"
"""The variable that has setproctitle leave the environment in place, which other programs read.
Titles are then no longer than the arguments."""


def set_title(title: str) -> None:
    """Names the process. Its arguments, which may hold a key, are not shown any more."""
    os.environ[_KEEP] = "1"
    setproctitle(title)
    del os.environ[_KEEP]
