"""Examines which transformers models can run here, and the calls of their attention modules. It
needs no weights: one forward pass computes shapes only."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import torch_dtype
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit_lm_transformers.attention import EXAMINED, NAME, NOT_CAUSAL, ModuleCall, calls_of
from toolkit_lm_transformers.deadline import deadline
from toolkit_lm_transformers.head import decoder_of, without_decoder
from toolkit_lm_transformers.layout import CacheLayout, find_layout, recomputing

_LAYER_TYPES = ("full_attention", "sliding_attention", "dense", "sparse")
_GROWING_ROPES = ("dynamic", "longrope")
_SHAPES_SECONDS = 60.0
"""Longest time of a pass over shapes. It usually takes a hundredth of a second per layer."""


class _OwnAttentionError(UnsupportedError):
    """Why a model cannot run on paged attention. Its own code may run it, sequence by sequence."""


class Examined(NamedTuple):
    """Facts about a model that can run here."""

    calls: dict[str, ModuleCall]
    """Attention calls of the model, by module. Empty: it attends by its own code."""
    first_position: int
    """The position of a sequence's first token: 0, or as RoBERTa has it the one after padding's."""
    layout: CacheLayout | None = None
    """What its own cache holds, where it attends by its own code."""
    reason: str = ""
    """Why it attends by its own code."""


def read_config(vllm_config: VllmConfig) -> Any:
    """The checkpoint's config as transformers holds it. Raises UnsupportedError where transformers
    has no causal language model for it."""
    values = vllm_config.hf_config
    name = values["architectures"][0]
    model_type = values.get("model_type")
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        of_class = getattr(transformers, name).config_class.model_type
        if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) != name and model_type != of_class:
            raise UnsupportedError(
                f"config.json's model_type {model_type!r} does not belong to {name}"
            )
        return read_by_class(values, name)
    if hasattr(transformers, name):
        raise UnsupportedError(f"{name} of transformers is not a causal language model")
    if "AutoModelForCausalLM" not in (values.get("auto_map") or {}):
        raise UnsupportedError(f"transformers {transformers.__version__} has no class {name}")
    if not vllm_config.model.trust_remote_code:
        raise UnsupportedError(
            f"{name} is code that the checkpoint brings along, which runs with "
            "trust_remote_code=True only"
        )
    assert vllm_config.checkpoint is not None
    path = vllm_config.checkpoint.path

    def read() -> Any:
        # Reads a folder: nothing is fetched.
        return transformers.AutoConfig.from_pretrained(  # nosec B615
            path, trust_remote_code=True
        )

    return understood(read, "read its config.json")


def read_by_class(values: dict[str, Any], name: str) -> Any:
    """The config of a class of transformers. Raises UnsupportedError where transformers cannot read
    it.

    A class of transformers goes before code of the checkpoint, trusted or not.
    """
    model_type = values.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise UnsupportedError(f"config.json's model_type {model_type!r} does not belong to {name}")
    config_class = transformers.CONFIG_MAPPING[model_type]
    own = {key: value for key, value in values.items() if key != "auto_map"}
    return understood(
        lambda: config_class.from_dict(config_class._decode_special_floats(own)),
        "read its config.json",
    )


def build(
    config: Any, dtype: torch.dtype, trust_remote_code: bool, attention: str | None = NAME
) -> Any:
    """A model of transformers on the default device, in eval mode, whose attention is ours (None:
    transformers' own). Its parameters hold anything."""
    options = {"dtype": dtype, "attn_implementation": attention}
    name = (config.architectures or [""])[0]
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and not hasattr(config, "auto_map"):
        model = getattr(transformers, name)._from_config(config, **options)
    else:
        model = transformers.AutoModelForCausalLM.from_config(
            config, trust_remote_code=trust_remote_code, **options
        )
    return model.eval()


def examine(vllm_config: VllmConfig) -> Examined:
    """Examines the checkpoint's model. Raises UnsupportedError, with the reason, if it cannot run
    here."""
    config = read_config(vllm_config)
    check_config(config, vllm_config)
    if config.is_encoder_decoder:
        raise UnsupportedError("it is an encoder-decoder model")
    try:
        return _on_paged_attention(config, vllm_config)
    except _OwnAttentionError as error:
        refusal = str(error)
    return Examined({}, 0, _layout(config, vllm_config, refusal), refusal)


def _on_paged_attention(config: Any, vllm_config: VllmConfig) -> Examined:
    trust = vllm_config.model.trust_remote_code
    model_class = getattr(transformers, vllm_config.hf_config["architectures"][0], None)
    if model_class is not None and not model_class._can_set_attn_implementation():
        raise _OwnAttentionError(
            "its attention does not go through transformers' attention interface"
        )
    _check_layer_types(config)
    with torch.device("meta"):
        # In bfloat16, as the products of grouped experts have no other shapes to compute.
        model = understood(lambda: build(config, torch.bfloat16, trust, EXAMINED), "make the model")
    _check_model(model)
    hidden_states = understood(lambda: _run(model), "run the model on shapes alone")
    calls = dict(_attention_calls(model))
    _check_layers(config.get_text_config(), list(calls.values()))
    understood(lambda: _project(model, hidden_states), "compute logits on shapes alone")
    return Examined(calls, first_position(model))


def _layout(config: Any, vllm_config: VllmConfig, refusal: str) -> CacheLayout:
    """What a decoder that attends by its own code keeps of a sequence. Raises UnsupportedError,
    which begins with `refusal`."""
    trust = vllm_config.model.trust_remote_code
    # A checkpoint is examined before its dtype is known, too: what is kept is of the same kind.
    known = vllm_config.model.dtype
    dtype = torch.float32 if known == "auto" else torch_dtype(known)
    try:
        with torch.device("meta"):
            model = understood(lambda: build(config, torch.bfloat16, trust, None), "make the model")
        whole = not _has_apart_head(model)
        try:
            return understood(  # type: ignore[no-any-return]
                lambda: find_layout(model, dtype, whole), "run the model on shapes alone"
            )
        except UnsupportedError as error:
            return recomputing(model, whole, str(error))
    except UnsupportedError as error:
        raise UnsupportedError(f"{refusal}; and by its own attention: {error}") from error


def _has_apart_head(model: Any) -> bool:
    """Whether logits can be computed of hidden states alone."""
    head = model.get_output_embeddings()
    if decoder_of(model) is None or head is None:
        return False
    size = head.weight.shape[1]
    hidden_states = torch.empty(1, 2, size, dtype=torch.bfloat16, device="meta")
    try:
        understood(lambda: _project(model, hidden_states), "compute logits on shapes alone")
    except UnsupportedError:
        return False
    return True


def first_position(model: Any) -> int:
    """The position that a model of transformers gives to the first token of a sequence, where it is
    given none."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return int(module.padding_idx) + 1
    return 0


def understood(action: Any, step: str) -> Any:
    """The result of `action`, which runs code of transformers, or of the checkpoint, on a config
    that it may not be made for."""
    try:
        with deadline(_SHAPES_SECONDS, step):
            return action()
    except UnsupportedError:
        raise
    except Exception as error:
        raise _OwnAttentionError(
            f"transformers cannot {step}: {type(error).__name__}: {error}"
        ) from error


def check_config(config: Any, vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel
    text = config.get_text_config()
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise UnsupportedError("models of transformers run on one rank")
    if getattr(config, "quantization_config", None):
        raise UnsupportedError("its weights are quantized")
    if ropes := sorted(
        set(_rope_types(getattr(text, "rope_parameters", None))) & set(_GROWING_ROPES)
    ):
        raise UnsupportedError(
            f"its rotary angles ({ropes[0]}) depend on the longest sequence of the batch, which "
            "cached keys cannot follow"
        )


def _check_layer_types(config: Any) -> None:
    named = getattr(config.get_text_config(), "layer_types", None) or ()
    if kinds := sorted({str(kind) for kind in named} - set(_LAYER_TYPES)):
        raise _OwnAttentionError(f"it has layers of type {', '.join(kinds)}")


def _rope_types(parameters: Any) -> Iterator[str]:
    """The rotary types of a config's rope_parameters, which may be nested by layer type."""
    if isinstance(parameters, dict):
        for key, value in parameters.items():
            if key == "rope_type":
                yield str(value)
            yield from _rope_types(value)


def _check_model(model: Any) -> None:
    if model._is_stateful:
        raise _OwnAttentionError("it keeps a recurrent state beside the KV cache")
    if model.base_model is model:
        raise _OwnAttentionError("its decoder cannot be told from its head")
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise _OwnAttentionError(
            "it takes no position_ids: it derives positions from a batch that is not flat"
        )


@torch.no_grad()
def _run(model: Any) -> torch.Tensor:
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    # Beside a mask of padding, positions that begin again are no other sequence.
    mask = torch.ones_like(tokens, dtype=torch.bool)
    hidden_states: torch.Tensor = model.base_model(
        input_ids=tokens, position_ids=tokens, attention_mask=mask, use_cache=False
    )[0]
    return hidden_states


@torch.no_grad()
def _project(model: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = without_decoder(model)(
        inputs_embeds=hidden_states, use_cache=False
    ).logits
    return logits


def _check_layers(config: Any, calls: list[ModuleCall]) -> None:
    num_layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if len(calls) != num_layers:
        raise _OwnAttentionError(
            f"{len(calls)} of its {num_layers} layers attend through transformers' attention "
            "interface"
        )
    num_windows = sum(call.window is not None for call in calls)
    if kinds is not None and num_windows != kinds.count("sliding_attention"):
        raise _OwnAttentionError(
            f"{kinds.count('sliding_attention')} of its layers have sliding windows, and "
            f"{num_windows} hand them on"
        )


def _attention_calls(model: Any) -> Iterator[tuple[str, ModuleCall]]:
    for name, module in model.named_modules():
        calls = calls_of(module)
        if len(calls) > 1:
            raise _OwnAttentionError(f"it runs {name} {len(calls)} times in a forward pass")
        for call in calls:
            if call.refusal == NOT_CAUSAL:
                raise UnsupportedError(f"{call.refusal} ({name})")
            if call.refusal:
                raise _OwnAttentionError(f"{call.refusal} ({name})")
            yield name, call
