"""Loading of models: from a model class and a config to a model with weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import torch

from toolkit_lm.attention import CacheLayer
from toolkit_lm.config import LoadConfig, VllmConfig
from toolkit_lm.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    PluginError,
    UnsupportedError,
)
from toolkit_lm.kv import CrossSpec, FullSpec, WindowSpec
from toolkit_lm.model.checkpoint_loader import CheckpointLoader
from toolkit_lm.model.contract import Model, check_constructor
from toolkit_lm.model.fused import FusibleLayer
from toolkit_lm.model.kernels import Kernels, choose_models, construction
from toolkit_lm.model.linear import LinearBase
from toolkit_lm.model.linear_method import Quantization, UnquantizedMethod
from toolkit_lm.model.sources import Sources
from toolkit_lm.plugin import Plugins

_CACHE_DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn"}
"""Values of the option `kv_cache_dtype`, and the dtypes that they mean."""
_QUANTIZABLE = FullSpec, WindowSpec, CrossSpec
"""Kinds of caches that the option changes."""


def load_model(
    model_cls: type[Model],
    vllm_config: VllmConfig,
    device: torch.device,
    plugins: Plugins,
    prefix: str = "",
    loader: CheckpointLoader | None = None,
) -> Model:
    """Makes the shard of `vllm_config.parallel.rank` on `device`, and fills it from `loader`: by
    default, that of the config's load format. `prefix`: prefix of its layers' names in the engine,
    if it belongs to a part.

    Then each layer's linear method may rearrange its weights. Raises CheckpointError for files or
    weights that are missing or do not fit, and what `construct` raises.
    """
    checkpoint = vllm_config.checkpoint
    assert checkpoint is not None, "the config is not resolved: it has no checkpoint"
    try:
        check_constructor(model_cls)
    except PluginError as error:
        raise PluginError(f"{plugins.models.get(checkpoint.architecture).owner}: {error}") from None
    if loader is None:
        source = checkpoint.source or checkpoint.path
        loader = plugins.loaders.make(vllm_config.load.load_format, source)
        assert loader is not None
    model = construct(model_cls, vllm_config, device, plugins, loader.names(), prefix)
    model.requires_grad_(False).eval()
    try:
        loader.load(model)
    except CheckpointError as error:
        raise CheckpointError(
            f"{model_cls.__name__} cannot take the weights of {loader}: {error}"
        ) from error
    for module in model.modules():
        if isinstance(module, LinearBase):
            module.method.process(module)
    for module in model.modules():
        if isinstance(module, FusibleLayer):
            module.fuse(model.kernels)
    return model


def construct(
    model_cls: type[Model],
    vllm_config: VllmConfig,
    device: torch.device,
    plugins: Plugins,
    names: Iterable[str] = (),
    prefix: str = "",
) -> Model:
    """Makes the model without its weights. Its layers have the methods of the config's
    quantization, and compute with the config's kernels. `names`: names of the checkpoint's tensors.

    Raises UnsupportedError for a quantization that refuses the checkpoint or has a method for none
    of the layers, and for expert parallelism of a model without experts. Raises CapacityError for a
    model that does not fit into memory. Other errors of the model's constructor pass, with a note
    on the checkpoint.
    """
    quantization = _quantization(vllm_config, plugins)
    kernels: Kernels = plugins.kernels.make(select_kernels(vllm_config, plugins)[0], vllm_config)
    try:
        with (
            torch.device(device),
            construction(
                quantization=quantization,
                kernels=kernels,
                models=plugins.models,
                sources=Sources(names),
            ),
        ):
            model = model_cls(vllm_config=vllm_config, prefix=prefix)
            model.quantization = quantization
            changes_cache = _quantize_caches(model, quantization, vllm_config)
    except Exception as error:
        assert vllm_config.checkpoint is not None, (
            "the config is not resolved: it has no checkpoint"
        )
        action = (
            f"making {model_cls.__name__} from the config.json of {vllm_config.checkpoint.path!r}"
        )
        if isinstance(error, RuntimeError) and "allocate" in str(error):
            raise CapacityError(f"{action} takes more memory than there is: {error}") from error
        error.add_note(action)
        raise
    if vllm_config.parallel.enable_expert_parallel and not any(
        isinstance(m, Model) and m.divides_experts() for m in model.modules()
    ):
        raise UnsupportedError(
            f"enable_expert_parallel: {model_cls.__name__} has no experts that it can divide "
            "over ranks."
        )
    if quantization is not None and not changes_cache:
        _check_quantizes(model, vllm_config.load, plugins)
    return model


def _check_quantizes(model: Model, load: LoadConfig, plugins: Plugins) -> None:
    """Raises UnsupportedError if a quantization, other than the load format's own, has a method for
    no layer."""
    methods = [module.method for module in model.modules() if isinstance(module, LinearBase)]
    if load.quantization != plugins.loaders.get(load.load_format).quantization and all(
        isinstance(method, UnquantizedMethod) for method in methods
    ):
        raise UnsupportedError(
            f"quantization {load.quantization!r} has no method for any layer of "
            f"{type(model).__name__}. Use quantization='none'."
        )


def _quantize_caches(
    model: Model, quantization: Quantization | None, vllm_config: VllmConfig
) -> bool:
    """Has layers keep what the quantization and the options say. Returns whether the quantization
    has any keep something else than before.

    Raises UnsupportedError if the options ask for a type that no layer can keep, and ConfigError
    for a pattern that names no layer.
    """
    layers = {module.prefix: module for module in model.modules() if isinstance(module, CacheLayer)}
    options = vllm_config.cache
    wanted = _CACHE_DTYPES.get(options.kv_cache_dtype)
    changed = False
    # A pipeline stage may have none of the layers.
    obeyed = wanted is None or vllm_config.parallel.pipeline_parallel_size > 1
    for pattern in [] if obeyed else options.kv_cache_dtype_skip_layers:
        if not any(_names(pattern, name) for name in layers):
            raise ConfigError(
                f"kv_cache_dtype_skip_layers: {pattern!r} names no layer. Layers with a cache: "
                f"{' ... '.join(dict.fromkeys([*layers][:: max(len(layers) - 1, 1)]))}."
            )
    for layer in layers.values():
        if (spec := layer.kv_cache_spec()) is None:
            continue
        of = layers.get(layer.shares_with or "")
        name = (of or layer).prefix
        kept = spec
        if quantization is not None and options.kv_cache_dtype != "model":
            kept = quantization.kv_cache(spec, name)
            changed |= kept != spec
        if (
            wanted is not None
            and type(spec) in _QUANTIZABLE
            and not any(_names(pattern, name) for pattern in options.kv_cache_dtype_skip_layers)
        ):
            obeyed = True
            if getattr(kept, "dtype", None) != wanted:
                kept = msgspec.structs.replace(spec, dtype=wanted, scales="token")
        if kept != spec:
            layer.keep(kept, of)
    if not obeyed:
        raise UnsupportedError(
            f"kv_cache_dtype {options.kv_cache_dtype!r}: {type(model).__name__} has no layer that "
            "can keep keys and values in it, or kv_cache_dtype_skip_layers names all of them."
        )
    return changed


def _names(pattern: str, name: str) -> bool:
    """Whether a pattern of `kv_cache_dtype_skip_layers` names the layer, by number or by name."""
    return pattern in name.split(".") if pattern.isdigit() else fnmatchcase(name, pattern)


def _quantization(vllm_config: VllmConfig, plugins: Plugins) -> Quantization | None:
    """The config's quantization; None: no weight is quantized. Raises UnsupportedError."""
    name = vllm_config.load.quantization
    if name == "none":
        return None
    if refusal := plugins.quantization.ask(name, vllm_config, by_name=True):
        raise UnsupportedError(
            f"quantization {name!r} cannot run {vllm_config.model.model!r}: {refusal}."
        )
    made: Quantization = plugins.quantization.make(name, vllm_config)
    return made


def make_part(vllm_config: VllmConfig, hf_config: Mapping[str, Any], prefix: str) -> Model:
    """Makes a model within the model under construction. Its config.json is `hf_config`, whose
    `architectures` names the class.

    `prefix` is its name in the checkpoint. Raises UnsupportedError if no plugin registers the class
    and no fallback runs it.
    """
    assert vllm_config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
    models = choose_models()
    name = hf_config["architectures"][0]
    own = vllm_config.with_checkpoint(
        msgspec.structs.replace(
            vllm_config.checkpoint, architecture=name, hf_config=dict(hf_config)
        )
    )
    if name not in models.architectures():
        name = next(
            (fallback for fallback in models.fallbacks() if models.ask(fallback, own) is None), name
        )
    model: Model = models.load(name)(vllm_config=own, prefix=prefix)
    return model


def select_kernels(
    vllm_config: VllmConfig, plugins: Plugins
) -> tuple[str, list[tuple[str, str | None]]]:
    """Name of the kernels, and each candidate with the reason for its refusal (None: able). Raises
    UnsupportedError."""
    registry = plugins.kernels
    device = vllm_config.device
    action = f"compute {vllm_config.model.dtype} on {device.device}"
    return registry.choose(
        action,
        lambda entry, by_name: registry.ask(entry.key, vllm_config, by_name=by_name),
        device.kernels,
    )
