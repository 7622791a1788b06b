"""Shell completions: values of options, and models. `toolkit --install-completion` turns them
on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer
from toolkit_lm.config import Option
from toolkit_lm.plugin import Plugins, Registry

Complete = Callable[[typer.Context, str], list[str]]

_REGISTRIES = {
    "attention_backend": "attention_backends",
    "drafter": "drafters",
    "executor": "executors",
    "kernels": "kernels",
    "load_format": "loaders",
    "quantization": "quantization",
    "renderer": "renderers",
    "scheduling_policy": "scheduling_policies",
}
"""Registry of an option whose values are names that plugins register, by option."""
_PLUGINS = ("plugins", "disable_plugins", "routes")
"""Options whose values are plugins."""


def values_of(option: Option) -> Complete:
    """Completer of the option's values. If it gives none, shells complete files."""
    return lambda ctx, incomplete: _matching(_values(option, ctx.find_object(Plugins)), incomplete)


def models(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names that plugins register, and hub ids whose files are here."""
    plugins = ctx.find_object(Plugins)
    return _matching(
        [*(plugins.checkpoints.keys() if plugins else ()), *cached_models()], incomplete
    )


def plugin_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The installed plugins."""
    plugins = ctx.find_object(Plugins)
    return _matching([info.name for info in plugins.infos] if plugins else (), incomplete)


def cached_models() -> list[str]:
    """Hub ids of models in the cache of huggingface_hub."""
    home = (
        os.environ.get("HF_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )
    folder = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    try:
        return sorted(
            folder.name.removeprefix("models--").replace("--", "/")
            for folder in folder.glob("models--*")
            if folder.is_dir()
        )
    except OSError:
        return []


def _values(option: Option, plugins: Plugins | None) -> Iterable[str]:
    if option.choices:
        return option.choices
    if plugins is None:
        return ()
    if option.name in _PLUGINS:
        return [info.name for info in plugins.infos]
    registry: Registry[Any] | None = getattr(plugins, _REGISTRIES.get(option.name, ""), None)
    return registry.keys() if registry is not None else ()


def _matching(values: Iterable[str], incomplete: str) -> list[str]:
    return [value for value in values if value.startswith(incomplete)]
