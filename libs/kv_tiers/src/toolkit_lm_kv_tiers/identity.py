"""Identity of KV blocks that outlive their engine: a digest of all that keys and values depend on
beside what the digest of each block covers. Needs no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from toolkit_lm import __version__
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm.kv import KVCacheConfig

_WITHOUT_EFFECT = (
    "batches",
    "kv_disk",
    "kv_events",
    "kv_redis",
    "kv_transfer",
    "mcp",
    "opentelemetry",
    "prefix_retention",
    "router",
)
"""Shipped plugins whose options change no keys and values, so that engines that differ in them
share blocks."""
_FORMAT = 1
"""Version of what a block's bytes mean."""
_NO_EFFECT: dict[str, tuple[str, ...]] = {
    "model": (
        "model",
        "revision",
        "served_model_name",
        "generation_config",
        "override_generation_config",
        "trust_remote_code",
        "verify_fallback",
        "extra_tasks",
    ),
    "load": (),
    "cache": (
        "kv_cache_memory",
        "num_kv_blocks",
        "enable_prefix_caching",
        "encoder_cache_memory",
        "feature_cache_memory",
        "swap_memory",
    ),
    "parallel": ("rank", "data_parallel_size", "nodes", "executor"),
    "device": (),
    "attention": (),
    "checkpoint": ("path", "source", "generation_config", "pooling_profile"),
}
"""Sections of the config that keys and values depend on, each with its options that they do not
depend on. Of the other sections they depend on none."""
_TEXTS = (".md", ".txt", ".py")
"""Endings of a checkpoint's files that hold no weights and no settings."""
_WEIGHTS = "weights.json"
"""File with the digests of checkpoints, by the state of their files."""


def identity_of(
    config: VllmConfig, kv_cache: KVCacheConfig, folder: Path | None, option: str
) -> bytes:
    """SHA-256 of all that an engine's keys and values depend on. All its ranks have the same.

    `folder` keeps the digests of checkpoints; None: the user's folder of caches. `option`: the one
    that asks for the tier. Raises ConfigError, which names it, where the weights are in no file.
    """
    whole = msgspec.to_builtins(config)
    kept: dict[str, Any] = {
        section: {
            name: value for name, value in (whole[section] or {}).items() if name not in names
        }
        for section, names in _NO_EFFECT.items()
    }
    if (hf_config := kept["checkpoint"].get("hf_config")) is not None:
        kept["checkpoint"]["hf_config"] = {
            name: value for name, value in hf_config.items() if name != "_name_or_path"
        }
    kept["plugins"] = {
        name: values
        for name, values in whole["plugins"]["plugin_option"].items()
        if name.removeprefix("toolkit_lm_") not in _WITHOUT_EFFECT
    }
    kept["groups"] = [(msgspec.to_builtins(group.spec), group.backend) for group in kv_cache.groups]
    kept["weights"] = _weights(config, folder or _caches(), option)
    # A backend may lay out pages as the processor likes them.
    kept["code"] = [_FORMAT, __version__, platform.machine(), _processor()]
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=repr).encode()).digest()


def _processor() -> str:
    """Digest of the processor's capabilities; empty where the system does not tell them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()


def _caches() -> Path:
    """The user's folder of caches, made where it can be."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(base).expanduser() / "toolkit-lm"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _weights(config: VllmConfig, folder: Path, option: str) -> str:
    """Digest of the checkpoint's files: their names, sizes and contents."""
    checkpoint = config.checkpoint
    if checkpoint is None:
        return ""
    files = sorted(set(_files(Path(checkpoint.path), Path(checkpoint.source or checkpoint.path))))
    if config.load.load_format != "dummy" and all(path.suffix == ".json" for path in files):
        raise ConfigError(
            f"{option}: {checkpoint.path} has no file of weights, so that their KV blocks "
            "could not be told from those of others."
        )
    state = []
    for path in files:
        stat = path.stat()
        state.append([str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino])
    key = hashlib.sha256(json.dumps(state).encode()).hexdigest()
    known = _known(folder)
    if key not in known:
        with ThreadPoolExecutor(4, "kv digest") as pool:
            digests = [*pool.map(_digest, files)]
        named = [
            [path.name, path.stat().st_size, each]
            for path, each in zip(files, digests, strict=True)
        ]
        known[key] = hashlib.sha256(json.dumps(sorted(named)).encode()).hexdigest()
        _remember(folder, known)
    return known[key]


def _files(*places: Path) -> Iterator[Path]:
    for place in places:
        found = place.iterdir() if place.is_dir() else [place]
        for path in found:
            if path.is_file() and path.name[0] != "." and path.suffix not in _TEXTS:
                yield path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _known(folder: Path) -> dict[str, str]:
    """Digests of checkpoints, by the state of their files. A damaged file counts as none."""
    try:
        return msgspec.json.decode((folder / _WEIGHTS).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return {}


def _remember(folder: Path, known: dict[str, str]) -> None:
    newest = dict([*known.items()][-64:])
    part = folder / f"{_WEIGHTS}.{os.getpid()}"
    # Without the file, the next start reads the weights again.
    with contextlib.suppress(OSError):
        part.write_bytes(msgspec.json.encode(newest))
        part.chmod(0o600)
        part.replace(folder / _WEIGHTS)
