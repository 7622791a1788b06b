"""From a model class and a config to a model with weights."""

from __future__ import annotations

import zlib

import torch

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ToolkitError
from toolkit_lm.model.contract import Model, check_constructor
from toolkit_lm.model.weights import CheckpointWeights

DUMMY_STD = 0.02


def load_model(model_cls: type[Model], vllm_config: VllmConfig, device: torch.device) -> Model:
    """Makes the shard of `vllm_config.parallel.rank` on `device` and fills it: from the checkpoint, or at random (load_format "dummy").

    Then every module that has a method `process_weights_after_loading` is given the chance to rearrange its weights.
    Raises CheckpointError for files or weights that are missing or do not fit.
    """
    check_constructor(model_cls)
    assert vllm_config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
    weights = CheckpointWeights(vllm_config.checkpoint.path) if vllm_config.load.load_format == "safetensors" else None
    model = construct(model_cls, vllm_config, device)
    model.requires_grad_(False).eval()
    if weights is None:
        fill_randomly(model)
    else:
        try:
            model.load_weights(weights)
        except CheckpointError as error:
            raise CheckpointError(f"{model_cls.__name__} cannot take the weights of {weights}: {error}") from error
    for module in model.modules():
        if process := getattr(module, "process_weights_after_loading", None):
            process()
    return model


def construct(model_cls: type[Model], vllm_config: VllmConfig, device: torch.device) -> Model:
    """The model without its weights. Raises CheckpointError where config.json describes something that cannot be made."""
    try:
        with torch.device(device):
            return model_cls(vllm_config=vllm_config)
    except (ToolkitError, ImportError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise CheckpointError(f"{model_cls.__name__} cannot be made from this config.json: {reason}") from error


def fill_randomly(model: Model) -> None:
    """Small normal weights. Each depends on its name and shape only, so that ranks agree on what they share."""
    for name, param in model.named_parameters():
        generator = torch.Generator(device=param.device).manual_seed(zlib.crc32(name.encode()))
        torch.nn.init.normal_(param, std=DUMMY_STD, generator=generator)
