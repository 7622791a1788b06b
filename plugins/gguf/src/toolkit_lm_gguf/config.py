"""Makes the config.json of a GGUF file, and compares the file's tensors with it. Needs no torch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from toolkit_lm.errors import UnsupportedError, nearest

from toolkit_lm_gguf.container import TensorInfo
from toolkit_lm_gguf.families import FAMILIES, MIXTRAL, ROPE_TENSORS, Family, Place, place_of
from toolkit_lm_gguf.file import GGUFFile

_MOST = 2**31
"""Most that a size may be. The tensors of the file limit it further."""
_DTYPES = {"F32": "float32", "F16": "float16"}
"""Dtype of the model by the type of its embedding's weight. Other types compute in bfloat16."""


def family_of(file: GGUFFile) -> Family:
    """Raises UnsupportedError for an architecture that no model class is known to compute."""
    name = file.architecture
    if name not in FAMILIES:
        raise UnsupportedError(
            f"{file.path} has the architecture {name!r}. {nearest(name, FAMILIES)}"
        )
    if name == "llama" and file.get("{arch}.expert_count", int, 0):
        return MIXTRAL
    return FAMILIES[name]


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json. Raises UnsupportedError for what no model class is known to compute, and
    CheckpointError for a file that lacks something or contradicts itself."""
    family = family_of(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        file.fail("has no tensor token_embd.weight")
    heads = _count(file, "attention.head_count")
    hidden_size = _count(file, "embedding_length")
    head_size = _count(file, "attention.key_length", hidden_size // heads)
    if (value_size := _count(file, "attention.value_length", head_size)) != head_size:
        raise UnsupportedError(
            f"{file.path} has keys of size {head_size} and values of size {value_size}, which "
            "differ."
        )
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _count(file, "feed_forward_length"),
        "num_hidden_layers": _count(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _count(file, "attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": _count(file, "context_length"),
        "rms_norm_eps": file.require("{arch}.attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": file.find("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": file.find("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": file.find("tokenizer.ggml.padding_token_id", int),
        "dtype": _DTYPES.get(embedding.type.name, "bfloat16"),
    }
    config |= _rope(file, head_size)
    config |= _OWN.get(family.model_type, _nothing)(file, config)
    _check_tensors(file, family, config)
    return {key: value for key, value in config.items() if value is not None}


def _count(file: GGUFFile, key: str, default: int | None = None) -> int:
    key = f"{file.architecture}.{key}"
    value = file.require(key, int) if default is None else file.get(key, int, default)
    if not 1 <= value < _MOST:
        file.fail(f"states {key} {value}, which must be at least 1")
    return value


def _rope(file: GGUFFile, head_size: int) -> dict[str, Any]:
    """The rotary embeddings, and the length of the context before they were scaled."""
    theta = file.get("{arch}.rope.freq_base", float, 10000.0)
    scaling = file.get("{arch}.rope.scaling.type", str, "none")
    factor = file.find("{arch}.rope.scaling.factor", float)
    original = file.find("{arch}.rope.scaling.original_context_length", int)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if "rope_freqs.weight" in file.tensors or "rope_factors_long.weight" in file.tensors:
        rope |= _factors(file)
    elif scaling == "linear":
        rope |= {"rope_type": "linear", "factor": factor or 1.0}
    elif scaling == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": file.find("{arch}.rope.scaling.yarn_beta_fast", float),
            "beta_slow": file.find("{arch}.rope.scaling.yarn_beta_slow", float),
        }
        if original is not None:
            rope["original_max_position_embeddings"] = original
    elif scaling != "none":
        raise UnsupportedError(
            f"{file.path} scales its rotary embeddings by {scaling!r}. Able: linear, longrope with "
            "its factors, none, yarn."
        )
    rotated = _count(file, "rope.dimension_count", head_size)
    found: dict[str, Any] = {"rope_parameters": rope}
    if rotated != head_size:
        found["partial_rotary_factor"] = rotated / head_size
    if "rope_factors_long.weight" in file.tensors:
        found["original_max_position_embeddings"] = original
    return found


def _factors(file: GGUFFile) -> dict[str, Any]:
    """A factor for each frequency, as LongRoPE has them: Llama 3's are the same at all lengths."""
    names = (
        ("rope_freqs.weight", "rope_freqs.weight")
        if "rope_freqs.weight" in file.tensors
        else ("rope_factors_short.weight", "rope_factors_long.weight")
    )
    short, long = (_floats(file, name) for name in names)
    attention_factor = file.find("{arch}.rope.scaling.attn_factor", float)
    if names[0] == names[1]:
        attention_factor = 1.0
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention_factor,
    }


def _floats(file: GGUFFile, name: str) -> list[float]:
    tensor = file.tensors.get(name)
    if tensor is None:
        file.fail(f"has no tensor {name}")
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        file.fail(f"holds {name} as {tensor.type.name} {list(tensor.shape)}, not a row of F32")
    return list(struct.unpack_from(f"<{tensor.shape[0]}f", tensor.data, tensor.start))


def _check_tensors(file: GGUFFile, family: Family, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for tensors that are missing, unknown, or of another size than the
    metadata states."""
    sizes = sizes_of(config)
    for name, tensor in file.tensors.items():
        if name in ROPE_TENSORS:
            continue
        place = place_of(family, name)
        if place is None:
            file.fail(f"holds the tensor {name}, which {family.architecture} does not have")
        _check_size(file, tensor, place, sizes)
    num_layers = config["num_hidden_layers"]
    for layer in range(num_layers):
        for stem in family.layer:
            if (name := f"blk.{layer}.{stem}.weight") not in file.tensors:
                file.fail(f"has {num_layers} layers, and no tensor {name}")
    if f"blk.{num_layers}.{next(iter(family.layer))}.weight" in file.tensors:
        file.fail(f"states {num_layers} layers, and holds tensors of layer {num_layers}")
    if "output_norm.weight" not in file.tensors:
        file.fail("has no tensor output_norm.weight")
    tokens = file.find("tokenizer.ggml.tokens", list)
    if tokens is not None and len(tokens) != config["vocab_size"]:
        file.fail(
            f"has {len(tokens)} tokens in tokenizer.ggml.tokens, and {config['vocab_size']} rows "
            "in token_embd.weight"
        )


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that letters stand for in `Family`."""
    heads, kv_heads, head_size = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    return {
        "V": config["vocab_size"],
        "H": config["hidden_size"],
        "I": config["intermediate_size"],
        "Q": heads * head_size,
        "K": kv_heads * head_size,
        "D": head_size,
        "E": config.get("num_local_experts") or config.get("num_experts"),
        "M": config.get("moe_intermediate_size"),
    }


def _check_size(file: GGUFFile, tensor: TensorInfo, place: Place, sizes: Mapping[str, int]) -> None:
    expected = place.shape(sizes)
    if tensor.shape != expected:
        file.fail(
            f"holds the tensor {tensor.name} of shape {list(tensor.shape)}, and its metadata ask "
            f"for {list(expected)}"
        )


Own = Callable[[GGUFFile, Mapping[str, Any]], dict[str, Any]]
"""(file, config so far) -> keys that a family adds."""


def _nothing(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _mixtral(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": _count(file, "expert_count"),
        "num_experts_per_tok": _count(file, "expert_used_count"),
    }


def _qwen3_moe(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": _count(file, "expert_count"),
        "num_experts_per_tok": _count(file, "expert_used_count"),
        "moe_intermediate_size": _count(file, "expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma2(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": _count(file, "attention.sliding_window"),
        "attn_logit_softcapping": file.get("{arch}.attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": file.get("{arch}.final_logit_softcapping", float, 30.0),
        "query_pre_attn_scalar": _query_scalar(config, num_layers=46),
    }


def _gemma3(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    everywhere = config["rope_parameters"]
    nearby = file.get("{arch}.rope.freq_base_swa", float, 10000.0)
    return {
        "sliding_window": _count(file, "attention.sliding_window"),
        "sliding_window_pattern": _count(file, "attention.sliding_window_pattern", 6),
        "final_logit_softcapping": file.find("{arch}.final_logit_softcapping", float),
        "query_pre_attn_scalar": _query_scalar(config, num_layers=62),
        "rope_parameters": {
            "full_attention": everywhere,
            "sliding_attention": {"rope_type": "default", "rope_theta": nearby},
        },
    }


def _query_scalar(config: Mapping[str, Any], num_layers: int) -> float:
    """The number whose root divides scores. Files do not state it: it is the size of a head, but
    in the largest of the family, which is known by its layers."""
    if config["num_hidden_layers"] == num_layers:
        return float(config["hidden_size"] / config["num_attention_heads"])
    return float(config["head_dim"])


def _phi3(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": file.get("{arch}.attention.sliding_window", int, 0) or None}


def _granite(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "logits_scaling": file.get("{arch}.logit_scale", float, 1.0),
        "embedding_multiplier": file.get("{arch}.embedding_scale", float, 1.0),
        "residual_multiplier": file.get("{arch}.residual_scale", float, 1.0),
        "attention_multiplier": file.get(
            "{arch}.attention.scale", float, config["head_dim"] ** -0.5
        ),
    }


def _olmo2(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    if window := file.get("{arch}.attention.sliding_window", int, 0):
        raise UnsupportedError(
            f"{file.path} is an OLMo 3: its layers have a window of {window} tokens, which no "
            "model class computes."
        )
    return {}


_OWN: Mapping[str, Own] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
}
"""Functions that add a family's fields to config.json, by `model_type`."""
