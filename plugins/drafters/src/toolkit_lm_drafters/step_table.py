"""Times of decode steps that earlier starts have measured, on disk."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import platformdirs
import torch
from msgspec import Meta
from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm.step import Drafter, StepTime
from torch import nn

logger = logging.getLogger(__name__)

_FORMAT = 1
_SECTIONS = ("model", "load", "device", "attention", "compilation", "plugins", "checkpoint")
"""Sections of the config that a step's time depends on."""
_CACHE = ("block_size", "kv_cache_dtype", "kv_cache_dtype_skip_layers")
"""Options of the cache that it depends on."""
_Checked = list[
    tuple[
        Annotated[int, Meta(ge=1)],
        Annotated[int, Meta(ge=-1)],
        Annotated[float, Meta(gt=0, le=3600)],
    ]
]


class StepTable:
    """Steps that were measured on one machine, with one model, its kernels and its drafters.

    A file that is damaged is as good as none, and one that cannot be written is left out: what it
    says only orders what an engine tries first, and is corrected by the steps that run.
    """

    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        made_of = (
            _FORMAT,
            _machine(config.device.device),
            plugins.fingerprint().digest,
            config.scheduler.drafter,
            [getattr(config, name) for name in _SECTIONS],
            [getattr(config.cache, name) for name in _CACHE],
        )
        name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]
        self.path = default_root() / f"{name}.json"

    def read(self) -> list[StepTime]:
        """Returns the steps; empty: there are none."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=_Checked)
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            logger.info("%s is measured anew: %s", self.path, error)
            return []

    def write(self, steps: Sequence[StepTime]) -> None:
        """Writes all steps. Processes that start at once each write a file, and the last stays."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, delete=False) as file:
                file.write(msgspec.json.encode(steps))
            os.replace(file.name, self.path)


def default_root() -> Path:
    """`toolkit_lm/steps` in the user's cache folder."""
    return Path(platformdirs.user_cache_dir("toolkit_lm")) / "steps"


def _machine(device: str) -> tuple[object, ...]:
    if device.startswith("cuda"):
        return platform.node(), torch.cuda.get_device_name(torch.device(device))
    return platform.node(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()


class Tabled(Drafter):
    """Base of drafters that keep measured steps on disk."""

    @classmethod
    def describe(
        cls, model: nn.Module, config: VllmConfig, *, plugins: Plugins, options: Any
    ) -> list[str]:
        times = {(rows, drafts): took for rows, drafts, took in StepTable(config, plugins).read()}
        shown = [
            f"{(times[rows, 0] - plain) * 1e3:.2f} ms beside {plain * 1e3:.2f} for {rows}"
            for (rows, drafts), plain in sorted(times.items())
            if drafts < 0 and (rows, 0) in times
        ]
        if not shown:
            return ["a draft's time is not known: no start on this machine has kept it"]
        subject = (
            "a draft of all drafters" if len(config.scheduler.drafter or ()) > 1 else "a draft"
        )
        return [f"{subject} takes, by rows of the step: {', '.join(shown)}"]

    def known_steps(self) -> list[StepTime]:
        return StepTable(self.config, self.plugins).read()

    def keep_steps(self, steps: Sequence[StepTime]) -> None:
        StepTable(self.config, self.plugins).write(steps)
