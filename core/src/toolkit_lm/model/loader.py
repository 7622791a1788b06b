"""From a model class and a config to a model with weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CapacityError, CheckpointError, PluginError, UnsupportedError
from toolkit_lm.model.checkpoint_loader import CheckpointLoader
from toolkit_lm.model.contract import Model, check_constructor
from toolkit_lm.model.fused import FusibleLayer
from toolkit_lm.model.kernels import Kernels, choose_models, construction
from toolkit_lm.model.linear import LinearBase
from toolkit_lm.model.linear_method import Quantization, UnquantizedMethod
from toolkit_lm.model.sources import Sources
from toolkit_lm.plugin import Plugins


def load_model(
    model_cls: type[Model],
    vllm_config: VllmConfig,
    device: torch.device,
    plugins: Plugins,
    prefix: str = "",
) -> Model:
    """Makes the shard of `vllm_config.parallel.rank` on `device`, and has the config's load format
    fill it. `prefix`: before its layers' names in the engine, where it is a part's.

    Then each layer's linear method may rearrange its weights. Raises CheckpointError for files or
    weights that are missing or do not fit, and as `construct` does.
    """
    checkpoint = vllm_config.checkpoint
    assert checkpoint is not None, "the config is not resolved: it has no checkpoint"
    try:
        check_constructor(model_cls)
    except PluginError as error:
        raise PluginError(f"{plugins.models.get(checkpoint.architecture).owner}: {error}") from None
    loader: CheckpointLoader = plugins.loaders.make(
        vllm_config.load.load_format, checkpoint.source or checkpoint.path
    )
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
    """The model without its weights, its layers held by the methods of the config's quantization,
    and computed by the kernels it names. `names`: of the checkpoint's tensors.

    Raises UnsupportedError for a quantization that refuses the checkpoint, or that has a method for
    none of the layers, and for expert parallelism of a model without experts; CapacityError for a
    model that does not fit into memory; and what else the model's constructor raises, with a note
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
    except Exception as error:
        assert vllm_config.checkpoint is not None, (
            "the config is not resolved: it has no checkpoint"
        )
        what = (
            f"making {model_cls.__name__} from the config.json of {vllm_config.checkpoint.path!r}"
        )
        if isinstance(error, RuntimeError) and "allocate" in str(error):
            raise CapacityError(f"{what} takes more memory than there is: {error}") from error
        error.add_note(what)
        raise
    if vllm_config.parallel.enable_expert_parallel and not any(
        isinstance(m, Model) and m.divides_experts() for m in model.modules()
    ):
        raise UnsupportedError(
            f"enable_expert_parallel: {model_cls.__name__} has no experts that it can divide "
            "over ranks."
        )
    methods = [module.method for module in model.modules() if isinstance(module, LinearBase)]
    if quantization is not None and all(
        isinstance(method, UnquantizedMethod) for method in methods
    ):
        raise UnsupportedError(
            f"quantization {vllm_config.load.quantization!r} has no method for any layer of "
            f"{model_cls.__name__}. Use --quantization none."
        )
    return model


def _quantization(vllm_config: VllmConfig, plugins: Plugins) -> Quantization | None:
    """That of the config; None: no weight is quantized. Raises UnsupportedError."""
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
    """A model within the one that is being constructed, whose config.json is `hf_config`: its
    `architectures` names the class.

    `prefix` is what the checkpoint calls it. Raises UnsupportedError where no plugin registers the
    class, and no fallback runs it.
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
    """The name of the kernels, and each candidate with the reason it was refused (None: able).
    Raises UnsupportedError."""
    registry = plugins.kernels
    device = vllm_config.device
    what = f"compute {vllm_config.model.dtype} on {device.device}"
    return registry.choose(
        what,
        lambda entry, by_name: registry.ask(entry.key, vllm_config, by_name=by_name),
        device.kernels,
    )
