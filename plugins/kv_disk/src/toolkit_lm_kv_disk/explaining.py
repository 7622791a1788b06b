"""What `toolkit explain` says of KV tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm_kv_tiers.limits import num_bytes, share_of_rank

from toolkit_lm_kv_disk.folders import is_own, num_bytes_of
from toolkit_lm_kv_disk.limits import disk_bytes


def explain(config: VllmConfig, options: Any) -> Mapping[str, Sequence[str]]:
    """The sizes of the tiers, and what the folder holds of all models."""
    lines = []
    for name, label in (("host", "kv_host"), ("disk", "kv_disk")):
        if (name == "host" and options.host is None) or (name == "disk" and options.dir is None):
            continue
        total = disk_bytes(options) if name == "disk" else num_bytes("host", options.host)
        share = share_of_rank(config, total)
        of_rank = "" if share == total else f", {share / 2**30:.2f} GiB on each rank"
        lines.append(f"{label}: at most {total / 2**30:.2f} GiB{of_rank}")
    if options.dir is not None:
        base = Path(options.dir).expanduser()
        folders = [path for path in base.iterdir() if is_own(path)] if base.is_dir() else []
        held = sum(map(num_bytes_of, folders)) / 2**30
        lines.append(f"{base}: {held:.2f} GiB, in {len(folders)} folders, one per identity")
    return {"KV tiers": lines}
