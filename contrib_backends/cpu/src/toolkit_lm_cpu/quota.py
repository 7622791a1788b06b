"""CPU quotas of control groups: a container's share of the cores, which the core count does not
show."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def granted_cores(root: Path = _ROOT, own: Path = _OWN) -> float | None:
    """The least quota, in cores, of this process's control group and its parents. None: there is no
    quota."""
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    found = []
    for _, controllers, path in groups:
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = root / controllers / path.lstrip("/")
        while True:
            found.append(_quota(folder))
            if folder == root / controllers or folder == folder.parent:
                break
            folder = folder.parent
    return min((cores for cores in found if cores is not None), default=None)


def _quota(folder: Path) -> float | None:
    try:
        if (limit := folder / "cpu.max").exists():
            quota, period = limit.read_text().split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
