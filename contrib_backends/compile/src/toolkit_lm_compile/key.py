"""Cache keys: digests of all that compiled code depends on. They hold no path, so the cache's
folder may move."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import toolkit_lm
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from toolkit_lm.config import CompilationOptions, VllmConfig
from toolkit_lm.model import Model
from toolkit_lm.plugin import Plugins
from torch import nn

from toolkit_lm_compile.options import effective

_NO_EFFECT: dict[str, tuple[str, ...]] = {
    "model": (
        "model",
        "revision",
        "served_model_name",
        "generation_config",
        "seed",
        "trust_remote_code",
        "verify_fallback",
    ),
    "load": ("load_format",),
    "cache": (
        "kv_cache_memory",
        "num_kv_blocks",
        "enable_prefix_caching",
        "encoder_cache_memory",
        "feature_cache_memory",
        "swap_memory",
    ),
    "scheduler": ("scheduling_policy", "preemption_mode", "max_num_seqs", "max_num_batched_tokens"),
    "parallel": ("rank", "data_parallel_size", "nodes", "executor"),
    "checkpoint": ("path", "source", "generation_config", "pooling_profile"),
}
"""Options by section that do not affect the forward pass. All others are part of the key. Each rank
has its own folder, so `rank` is listed here."""
_NO_EFFECT_SECTIONS = ("engine", "node", "renderer", "limits", "pooler", "compilation")
_CPUINFO = Path("/proc/cpuinfo")


def ingredients(
    model: Model, config: VllmConfig, options: CompilationOptions, plugins: Plugins
) -> dict[str, str]:
    """Ingredients of the cache key: a digest per name, so that a miss can be explained."""
    found = {
        "config": effective_config(config),
        "compilation": effective(options, config.compilation.optimization_level),
        "torch": [
            torch.__version__,
            _portable(inductor_config),
            _portable(dynamo_config),
            _portable(functorch_config),
        ],
        "machine": [
            platform.machine(),
            sys.version_info[:2],
            torch.backends.cpu.get_cpu_capability(),
            _cpu_flags(),
            _device(config.device.device),
        ],
        "core": _core(),
        "plugins": _plugins(model, plugins),
        "model source": _sources(model),
        "layers": [
            layer for name, module in model.named_modules() for layer in _layer(name, module)
        ],
    }
    return {name: _digest(value) for name, value in found.items()}


def key_of(found: dict[str, str]) -> str:
    """The cache key, which names the entry's folder."""
    return _digest(found)[:32]


def effective_config(config: VllmConfig) -> dict[str, Any]:
    """The config without the options that do not affect the forward pass."""
    whole = msgspec.to_builtins(config)
    kept = {
        section: values for section, values in whole.items() if section not in _NO_EFFECT_SECTIONS
    }
    for section, names in _NO_EFFECT.items():
        kept[section] = {name: value for name, value in kept[section].items() if name not in names}
    kept["checkpoint"]["hf_config"] = {
        name: value for name, value in config.hf_config.items() if name != "_name_or_path"
    }
    return kept


def source_digest(module: str) -> str | None:
    """SHA-256 of a module's source file. None: it has no source file."""
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if file is None:
        try:
            spec = find_spec(module)
        except (ImportError, ValueError):
            return None
        file = spec.origin if spec is not None else None
    return (
        hashlib.sha256(Path(file).read_bytes()).hexdigest()
        if file is not None and Path(file).is_file()
        else None
    )


@cache
def _core() -> str:
    """SHA-256 of core's modules that graphs pass through. It is computed once per process."""
    root = Path(toolkit_lm.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(
        path
        for room in ("model", "attention", "distributed")
        for path in (root / room).rglob("*.py")
    ):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _plugins(model: Model, plugins: Plugins) -> list[tuple[str, str | None, str]]:
    """Name, version and content digest of the plugins in the model, and of this one.

    Other plugins' changes to the config are part of the config's digest.
    """
    objects = [
        *model.modules(),
        *(getattr(module, "method", None) for module in model.modules()),
        model.kernels,
    ]
    packages = {
        cls.__module__.partition(".")[0] for object_ in objects for cls in type(object_).__mro__
    } | {__package__}
    used = {info.name for info in plugins.infos if packages & {*info.packages}}
    return [
        (plugin.name, plugin.version, plugin.content)
        for plugin in plugins.fingerprint().plugins
        if plugin.name in used and plugin.name != "core"
    ]


def _sources(model: Model) -> dict[str, str | None]:
    """SHA-256 of the source files of the model's classes, by module. torch and core count in other
    ingredients."""
    modules = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    return {
        name: source_digest(name)
        for name in sorted(modules)
        if name.partition(".")[0] not in ("torch", "builtins", "toolkit_lm")
    }


def _layer(name: str, module: nn.Module) -> list[tuple[str, ...]]:
    """Changes of parts to a module: hooks, buffers and the chain of wrapped methods. Empty if there
    are none."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    buffers = [*module.named_buffers(recurse=False)]
    methods = []
    method = getattr(module, "method", None)
    while method is not None:
        methods.append(type(method).__qualname__)
        method = getattr(method, "inner", None)
    added = [
        *(getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks),
        *(f"{buffer} {tensor.dtype} {list(tensor.shape)}" for buffer, tensor in buffers),
        *methods,
    ]
    return [(name, *added)] if added else []


def _cpu_flags() -> str | list[str]:
    """The CPU's instruction flags. Generated C++ is compiled for this very CPU (-march=native),
    beyond its vector instructions."""
    text = _CPUINFO.read_text(encoding="utf-8", errors="replace") if _CPUINFO.is_file() else ""
    found = re.search(r"^(?:flags|Features)[ \t]*:(.*)$", text, re.MULTILINE)
    return sorted(found[1].split()) if found is not None else platform.processor()


def _device(device: str) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else device.partition(":")[0]
    )


def _portable(config: Any) -> Any:
    return config.save_config_portable()


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(_ordered(value)).encode()).hexdigest()


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((str(name), _ordered(item)) for name, item in value.items())
    if isinstance(value, set | frozenset):
        return sorted(repr(_ordered(item)) for item in value)
    return [_ordered(item) for item in value] if isinstance(value, list | tuple) else value
