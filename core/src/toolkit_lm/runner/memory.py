"""Free memory of a device."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device now. On a host: without swapping, and within the
    container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(int(psutil.virtual_memory().available), _left_in_container())


def _left_in_container() -> int:
    try:
        limit, used = (
            int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):
        # No control group of version 2, or one without a limit ("max").
        return 2**63
    return max(0, limit - used)
