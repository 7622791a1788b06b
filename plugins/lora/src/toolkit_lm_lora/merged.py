"""Adapters that are merged into the weights at the start. Merged checkpoints are kept on disk, by
the digests of what they are made of."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import platformdirs
from toolkit_lm import __version__
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve

from toolkit_lm_lora.enabled import NAMES
from toolkit_lm_lora.files import AdapterFolder
from toolkit_lm_lora.listed import listed

logger = logging.getLogger(__name__)
_FORMAT = "toolkit_lm merged 1"


def merged(config: VllmConfig, options: Any) -> VllmConfig:
    """Returns the config of the checkpoint with the adapters of the option `merge` in its weights,
    which is written unless it is kept from before. Raises ToolkitError."""
    adapters = _adapters(options.merge)
    rest = {
        name: {key: value for key, value in own.items() if key != "merge" or name not in NAMES}
        for name, own in config.plugins.plugin_option.items()
    }
    base = config.replace(plugin_option=rest)
    plugins = Plugins.load(base.plugins)
    resolved = resolve(base.replace(device="cpu"), plugins)
    assert resolved.checkpoint is not None
    if resolved.load.load_format == "dummy":
        raise UnsupportedError("option merge of the plugin lora: load_format is 'dummy'.")
    source = Path(resolved.checkpoint.source or resolved.checkpoint.path)
    ingredients = {
        "format": _FORMAT,
        "version": __version__,
        "files": _files(source),
        "adapters": [(AdapterFolder(path).digest, scale) for path, scale in adapters],
    }
    key = hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()[:32]
    root = (
        Path(platformdirs.user_cache_dir("toolkit_lm")) / "merged"
        if options.merge_dir is None
        else Path(options.merge_dir)
    )
    folder = root / key
    if not folder.is_dir():
        _write(base, plugins, adapters, folder)
    with contextlib.suppress(OSError):
        os.utime(folder)
    _evict(folder, int(options.merge_gib * 2**30))
    logger.info("the model with merged adapters is read from %s", folder)
    return config.replace(
        model=str(folder),
        revision=None,
        load_format="auto",
        served_model_name=resolved.served_model_names,
    )


def _adapters(option: list[str] | str) -> list[tuple[Path, float]]:
    found = []
    for entry in listed(option, "merge"):
        path, has_scale, text = entry.rpartition("=")
        try:
            scale = float(text) if has_scale else 1.0
        except ValueError:
            raise ConfigError(
                f"plugin lora: option merge: {entry!r} is neither FOLDER nor FOLDER=SCALE."
            ) from None
        found.append((Path(path if has_scale else entry), scale))
    return found


def _files(source: Path) -> list[tuple[str, int, int]]:
    """Path, size and time of the last change of each file of a checkpoint."""
    paths = [source] if source.is_file() else sorted(path for path in source.iterdir())
    states = [(path.resolve(), path.stat()) for path in paths if path.is_file()]
    return [(str(path), state.st_size, state.st_mtime_ns) for path, state in states]


def _write(
    config: VllmConfig, plugins: Plugins, adapters: Sequence[tuple[Path, float]], folder: Path
) -> None:
    """Writes a merged checkpoint. Processes that start at once each write one, and one stays."""
    from toolkit_lm_lora.merging import merge

    staged = folder.with_name(f"{folder.name}-{uuid.uuid4().hex}")
    try:
        merge(config, plugins, adapters, staged)
        with contextlib.suppress(OSError):
            # Another process may have written it meanwhile.
            staged.rename(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _evict(folder: Path, limit: int) -> None:
    """Removes the merged checkpoints that were not used for longest, until all fit the limit. The
    one that is used stays."""
    with contextlib.suppress(OSError):
        others = [path for path in folder.parent.iterdir() if path.is_dir() and path != folder]
        sizes = {path: _size(path) for path in others}
        total = _size(folder) + sum(sizes.values())
        for path in sorted(others, key=lambda path: path.stat().st_mtime):
            if total <= limit:
                return
            total -= sizes[path]
            shutil.rmtree(path, ignore_errors=True)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
