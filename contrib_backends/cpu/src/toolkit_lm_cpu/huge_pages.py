"""Huge pages: what the system gives of them, told in `toolkit explain`."""

from __future__ import annotations

from pathlib import Path

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def describe(setting: Path = _SETTING) -> str:
    """A line about the huge pages of weights and the KV cache.

    `setting`: the kernel's file of modes, such as "always [madvise] never".
    """
    try:
        modes = setting.read_text()
    except OSError:
        return f"none: this system does not tell of any ({setting} cannot be read)"
    mode = modes.partition("[")[2].partition("]")[0]
    if mode in ("always", "madvise"):
        return f"asked for the kernels' weights and KV cache (transparent_hugepage: {mode})"
    return f"none: transparent_hugepage is {mode or modes.strip()!r}, not madvise or always"
