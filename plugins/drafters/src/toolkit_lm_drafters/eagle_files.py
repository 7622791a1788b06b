"""EAGLE heads as they are published: which of them a checkpoint is, and which layers it reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError
from toolkit_lm.model import HFConfig, Layers
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import find_source, read_json
from torch import nn

_BUILT = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
"""Values of eagle_config, as ModelOpt writes it, that the formula of EAGLE-3 has."""
_OF_SPECULATORS = {
    "speculators_model_type": "eagle3",
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
"""Values of a config.json of speculators that the formula of EAGLE-3 has."""
_LAYERS = "transformer_layer_config"
_IDS = "eagle_aux_hidden_state_layer_ids"


class HeadFiles(NamedTuple):
    """A head's checkpoint."""

    source: Path
    load_format: str
    hf_config: dict[str, Any]
    """config.json, and the properties that only the tensors tell."""
    is_third: bool
    """EAGLE-3, which has `midlayer`, `d2t` or `hidden_norm`."""
    taps: list[str]
    """Names of the model's layers whose outputs the head reads, beside the last hidden state."""


def read_head(
    name: str | None, model: nn.Module, config: VllmConfig, plugins: Plugins
) -> HeadFiles:
    """Reads a head's config and the names of its tensors. Raises ConfigError, which names both
    sides, for a head that is not for this model."""
    if name is None:
        raise ConfigError(
            "drafter 'eagle' needs the head: drafters.model=FOLDER, or a hub id, or a name that a "
            "plugin registers."
        )
    names = names_of(name, config)
    try:
        source = find_source(replace(config.model, model=name, revision=None), plugins)
        hf_config = _flat(read_json(source / "config.json"), names)
        load_format = plugins.loaders.reading(source) or "safetensors"
        tensors = {
            tensor.removeprefix("model.")
            for tensor in plugins.loaders.make(load_format, source).names()
        }
        is_third = any(
            tensor == "d2t" or tensor.startswith("midlayer.") or ".hidden_norm." in tensor
            for tensor in tensors
        )
        taps = _taps(HFConfig(hf_config), model, names) if is_third else []
        _check(HFConfig(hf_config), config, names, has_own_width=bool(taps))
    except CheckpointError as error:
        raise ConfigError(f"{names}: {error}") from error
    found = {**hf_config, **_found(tensors, is_third), "num_taps": len(taps)}
    return HeadFiles(source, load_format, found, is_third, taps)


def names_of(head: str, config: VllmConfig) -> str:
    """Both sides, as errors name them."""
    return f"EAGLE head {head!r} and model {config.model.model!r}"


def _flat(hf_config: dict[str, Any], names: str) -> dict[str, Any]:
    """config.json of speculators (vLLM) as the authors write theirs: what it says of layers is in a
    dict of its own. Others are as they are."""
    if not isinstance(layers := hf_config.get(_LAYERS), dict):
        return hf_config
    _expect(hf_config, _OF_SPECULATORS, names)
    own = {key: value for key, value in hf_config.items() if key != _LAYERS}
    return {**layers, "norm_before_residual": True, **own}


def _expect(stated: Mapping[str, Any], built: Mapping[str, Any], names: str) -> None:
    """Raises ConfigError for a flag with another value than the formula has."""
    for flag, value in built.items():
        if stated.get(flag, value) != value:
            raise ConfigError(
                f"{names}: config.json states {flag} {stated[flag]!r}, and heads are built with "
                f"{value!r}."
            )


def _taps(config: HFConfig, model: nn.Module, names: str) -> list[str]:
    details = HFConfig(config.get("eagle_config", dict, {}))
    if not details.get("use_aux_hidden_state", bool, True):
        return []
    found = {
        path: len(module) for path, module in model.named_modules() if isinstance(module, Layers)
    }
    if len(found) != 1:
        raise ConfigError(
            f"{names}: the head reads layers of one decoder, and {type(model).__name__} has "
            f"{len(found)}."
        )
    [(path, count)] = found.items()
    _expect(details.values, _BUILT, names)
    layers = _outputs(config, details, count)
    wrong = [layer for layer in layers if type(layer) is not int or not 0 <= layer < count]
    if wrong or len(set(layers)) != len(layers):
        raise ConfigError(
            f"{names}: the head reads the outputs of layers {layers}, and the model has layers 0 "
            f"to {count - 1}. The head's config.json states them as {_IDS}: in eagle_config the "
            "layers themselves, beside it the layers after them."
        )
    return [f"{path}.{layer}" for layer in layers]


def _outputs(config: HFConfig, details: HFConfig, count: int) -> list[Any]:
    """Layers whose outputs a head reads."""
    if stated := details.get(_IDS, list):
        # ModelOpt, SGLang and SpecForge name these layers.
        return list(stated)
    if stated := config.get(_IDS, list):
        # vLLM and speculators name the layers that read these outputs.
        return [layer - 1 if type(layer) is int else layer for layer in stated]
    # The authors' code taps what enters layers 2, N // 2 and N - 3.
    return [1, count // 2 - 1, count - 4]


def _check(config: HFConfig, model: VllmConfig, names: str, *, has_own_width: bool) -> None:
    """Raises ConfigError for a head that is made for another model."""
    target = HFConfig(model.hf_config.get("text_config") or model.hf_config)
    width = config.require("hidden_size", int)
    width = config.get("target_hidden_size", int, width) if has_own_width else width
    sizes = {
        "hidden_size": (width, target.get("hidden_size", int)),
        "vocab_size": (config.require("vocab_size", int), model.vocab_size),
    }
    for key, (ours, theirs) in sizes.items():
        if theirs is not None and ours != theirs:
            raise ConfigError(
                f"{names}: the head is for a model of {key} {ours}, and this model's is {theirs}."
            )


def _found(names: Collection[str], is_third: bool) -> dict[str, bool]:
    """Properties of a head that only the checkpoint's tensors tell."""
    return {
        "attention_bias": any(name.endswith("q_proj.bias") for name in names),
        "output_bias": any(name.endswith("o_proj.bias") for name in names),
        "mlp_bias": any(name.endswith("gate_proj.bias") for name in names),
        "fc_bias": "fc.bias" in names,
        "own_embedding": is_third and "embed_tokens.weight" in names,
        "own_lm_head": is_third and "lm_head.weight" in names,
    }
