"""Metadata of a GGUF file from a config.json, and the factors of its rotary embeddings: the reverse
of `toolkit_lm_gguf.config`. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit_lm.errors import UnsupportedError, nearest

from toolkit_lm_gguf.families import FAMILIES, MIXTRAL, Family

_MODEL_TYPES: Mapping[str, tuple[str, Family]] = {
    **{family.model_type: (name, family) for name, family in FAMILIES.items()},
    MIXTRAL.model_type: ("llama", MIXTRAL),
    "mistral": ("llama", FAMILIES["llama"]),
}
"""Architecture of the file and family, by `model_type` in config.json."""
_GEMMAS = ("gemma2", "gemma3_text")
_PERIOD = 6
"""Of so many layers, one of Gemma 3 has no window."""


def family_for(config: Mapping[str, Any]) -> tuple[str, Family]:
    """The architecture that a file states, and the family. Raises UnsupportedError for a model that
    is in no file, or computes what a file cannot say."""
    model_type = str(config.get("model_type"))
    if model_type not in _MODEL_TYPES:
        raise UnsupportedError(
            f"models of the type {model_type!r} are not written to GGUF files. "
            f"{nearest(model_type, _MODEL_TYPES)}"
        )
    for key, problem in _problems(model_type, config):
        raise UnsupportedError(
            f"{key} of config.json {problem}, which a GGUF file of a {model_type} cannot say"
        )
    return _MODEL_TYPES[model_type]


def _problems(model_type: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields whose values files do not state, as key and problem."""
    activation = "gelu_pytorch_tanh" if model_type in _GEMMAS else "silu"
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    if config.get(key, activation) != activation:
        yield key, f"is {config[key]!r} and not {activation!r}"
    if model_type == "qwen3_moe":
        if not config.get("norm_topk_prob", False):
            yield "norm_topk_prob", "is false"
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            yield "mlp_only_layers or decoder_sparse_step", "has layers without experts"
    if model_type in _GEMMAS:
        layers = config["num_hidden_layers"]
        period = _period(config) if model_type == "gemma3_text" else 2
        expected = [
            "full_attention" if (layer + 1) % period == 0 else "sliding_attention"
            for layer in range(layers)
        ]
        if config.get("layer_types", expected) != expected:
            yield "layer_types", f"is not all windows but each layer {period}"
        head_size = head_size_of(config)
        is_largest = layers == {"gemma2": 46, "gemma3_text": 62}[model_type]
        scalar = config["hidden_size"] / config["num_attention_heads"] if is_largest else head_size
        if config.get("query_pre_attn_scalar", scalar) != scalar:
            yield "query_pre_attn_scalar", f"is {config['query_pre_attn_scalar']} and not {scalar}"
    elif model_type != "phi3" and _has_window(model_type, config):
        yield "sliding_window", f"is {config.get('sliding_window')}"


def _has_window(model_type: str, config: Mapping[str, Any]) -> bool:
    window = config.get("sliding_window")
    if not window or window >= config["max_position_embeddings"]:
        return False
    if config.get("layer_types"):
        return "sliding_attention" in config["layer_types"]
    always = model_type in ("mistral", "mixtral")
    return always or bool(config.get("use_sliding_window"))


def _period(config: Mapping[str, Any]) -> int:
    stated: list[str] = config.get("layer_types") or []
    if "full_attention" in stated:
        return stated.index("full_attention") + 1
    return int(config.get("sliding_window_pattern") or _PERIOD)


def head_size_of(config: Mapping[str, Any]) -> int:
    """Dimensions of a head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def metadata(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """The keys about the model. Raises UnsupportedError for rotary embeddings that a file cannot
    state."""
    heads = config["num_attention_heads"]
    head_size = head_size_of(config)
    stated = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        **_rope(config, head_size),
        **_own(config),
    }
    return {f"{arch}.{key}": value for key, value in stated.items() if value is not None}


def _own(config: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata that some families have."""
    experts = config.get("num_local_experts") or config.get("num_experts")
    return {
        **_of_gemma(config),
        "attention.sliding_window": config.get("sliding_window")
        if config["model_type"] in (*_GEMMAS, "phi3")
        else None,
        "expert_count": experts,
        "expert_used_count": config.get("num_experts_per_tok") if experts else None,
        "expert_feed_forward_length": config.get("moe_intermediate_size") if experts else None,
        "logit_scale": _float(config, "logits_scaling"),
        "embedding_scale": _float(config, "embedding_multiplier"),
        "residual_scale": _float(config, "residual_multiplier"),
        "attention.scale": _float(config, "attention_multiplier"),
    }


def _of_gemma(config: Mapping[str, Any]) -> dict[str, Any]:
    if config["model_type"] == "gemma2":
        return {
            "attn_logit_softcapping": float(config.get("attn_logit_softcapping") or 50.0),
            "final_logit_softcapping": float(config.get("final_logit_softcapping") or 30.0),
        }
    if config["model_type"] != "gemma3_text":
        return {}
    nearby = config.get("rope_parameters", {}).get("sliding_attention", {})
    theta = nearby.get("rope_theta") or config.get("rope_local_base_freq") or 10000.0
    return {
        "final_logit_softcapping": _float(config, "final_logit_softcapping"),
        "rope.freq_base_swa": float(theta),
        "attention.sliding_window_pattern": _period(config),
    }


def _float(config: Mapping[str, Any], key: str) -> float | None:
    value = config.get(key)
    return None if value is None else float(value)


def rope_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embeddings of layers that see all tokens: `rope_parameters`, or the older
    `rope_theta` and `rope_scaling`."""
    stated = config.get("rope_parameters") or {}
    stated = stated.get("full_attention", stated)
    older = {
        key: config[key]
        for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        if config.get(key) is not None
    }
    found = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0} | older
    found |= {key: value for key, value in stated.items() if value is not None}
    found |= {
        key: value for key, value in (config.get("rope_scaling") or {}).items() if value is not None
    }
    kind = found.get("rope_type") or found.get("type") or "default"
    return found | {"rope_type": {"su": "longrope"}.get(kind, kind)}


def _rope(config: Mapping[str, Any], head_size: int) -> dict[str, Any]:
    rope = rope_values(config)
    kind = rope["rope_type"]
    stated: dict[str, Any] = {
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_size * rope["partial_rotary_factor"]),
    }
    original = rope.get("original_max_position_embeddings")
    if kind in ("default", "llama3"):
        return stated
    if kind == "linear":
        return stated | {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "longrope":
        return stated | {
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": _longrope_factor(config, rope),
        }
    others = rope.keys() & {"attention_factor", "mscale", "mscale_all_dim", "truncate"}
    if kind != "yarn" or others:
        shown = f"{kind} with {', '.join(sorted(others))}" if others else kind
        raise UnsupportedError(
            f"rotary embeddings of the kind {shown} are not written to GGUF files. Able: default, "
            "linear, llama3, longrope, yarn"
        )
    return stated | {
        "rope.scaling.type": kind,
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": original,
        "rope.scaling.yarn_beta_fast": _float(rope, "beta_fast"),
        "rope.scaling.yarn_beta_slow": _float(rope, "beta_slow"),
    }


def _longrope_factor(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    """The factor of cosines and sines."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    stretch = rope.get("factor") or config["max_position_embeddings"] / original
    return math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0


def rope_factors(config: Mapping[str, Any]) -> dict[str, list[float]]:
    """The tensors of factors that divide frequencies, by name."""
    rope = rope_values(config)
    if rope["rope_type"] == "longrope":
        return {
            f"rope_factors_{length}.weight": list(map(float, rope[f"{length}_factor"]))
            for length in ("long", "short")
        }
    if rope["rope_type"] != "llama3":
        return {}
    size = int(head_size_of(config) * rope["partial_rotary_factor"])
    return {
        "rope_freqs.weight": [
            _llama3(rope, float(rope["rope_theta"]) ** (-index / size))
            for index in range(0, size, 2)
        ]
    }


def _llama3(rope: Mapping[str, Any], frequency: float) -> float:
    """The divisor of a frequency of Llama 3: 1 where a wave is short, `factor` where it is long, a
    weighted mean between them."""
    factor, low, high = (
        float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    turns = float(rope["original_max_position_embeddings"]) * frequency / (2 * math.pi)
    if turns < low:
        return factor
    if turns > high:
        return 1.0
    share = (turns - low) / (high - low)
    return 1 / ((1 - share) / factor + share)
