"""`toolkit env`: what a bug report needs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from typing import Annotated, Any

import typer
from toolkit_lm import __version__
from toolkit_lm.config import PluginsConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm_commands.options import engine_command

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "msgspec", "pluggy", "numpy")


@engine_command(PluginsConfig)
def env(
    config: PluginsConfig,
    plugins: Plugins,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the versions and the machine that a bug report needs."""
    facts = _facts(plugins)
    if json_output:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        rows = (
            [f"{key} {item}" for key, item in value.items()] if isinstance(value, dict) else [value]
        )
        for number, row in enumerate(rows):
            typer.echo(f"{name if number == 0 else '':<14}{row}")


def _facts(plugins: Plugins) -> dict[str, Any]:
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "toolkit-lm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu count": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "cuda": f"{torch.version.cuda}: {', '.join(devices)}" if devices else "none",
        "packages": {name: _version(name) for name in PACKAGES},
        "plugins": {
            info.name: f"{info.version or ''} {info.status}".strip() for info in plugins.infos
        },
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
