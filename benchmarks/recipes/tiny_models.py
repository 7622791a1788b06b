"""Recipes of tiny random checkpoints: the sizes by which a config of any class of transformers
becomes small, and what a `model_type` needs beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models
from toolkit_lm_devkit import randomize
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)

VOCAB_SIZE = 150
MOST_PARAMETERS = 10_000_000
SIZES = (
    dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embed_dim", "dim_model", "embedding_size"), 32
    )
    | dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "dim_ff", "dff", "ffn_hidden_size"), 48
    )
    | dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "d_inner", "feed_forward_size"), 48)
    | dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16
    )
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"), 4)
    | dict.fromkeys(
        ("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"), 2
    )
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4)
    | dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "mamba_n_heads"), 4)
    | dict.fromkeys(("head_dim", "d_head", "kv_channels", "q_lora_rank", "kv_lora_rank"), 8)
    | dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_head_dim"), 8)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
    | dict.fromkeys(
        ("num_experts_per_tok", "num_key_value_heads", "moe_k", "moe_topk", "index_n_heads"), 2
    )
    | dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length"), 128)
    | dict.fromkeys(("sliding_window", "attention_window", "window_size"), 12)
    | {"vocab_size": VOCAB_SIZE, "word_embed_proj_dim": 32}
    | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
)
"""Names of sizes in configs, and their values, if the class has them."""


PLAIN = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB_SIZE,
}
BLT_PART = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
PLAIN_QWEN2 = {"model_type": "qwen2", "num_key_value_heads": 2, **PLAIN}
TOWER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
WHISPER = {
    "model_type": "whisper",
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
}
GEMMA3 = {
    "vision_config": {**TOWER, "image_size": 32, "patch_size": 8},
    "mm_tokens_per_image": 4,
    "image_token_index": 112,
    "boi_token_index": 110,
    "eoi_token_index": 111,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

MLA = {"num_key_value_heads": 4}
"""Latent attention expands keys for each head."""

OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32"), MLA),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"), MLA),
    **dict.fromkeys(("esmc", "mistral4"), MLA),
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "visual_embed": False},
    "lilt": {"hidden_size": 48},
    "luke": {"entity_vocab_size": 50, "entity_emb_size": 16},
    "neomme": {"head_dim": 16},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, **MLA},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        **dict.fromkeys(
            ("patcher_config", "encoder_config", "decoder_config", "global_config"), BLT_PART
        ),
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "index_topk": 8,
        # With few heads, scores of keys are often 0, and which of them are taken is by chance.
        "index_n_heads": 16,
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank"), 8),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim"), 8),
        **dict.fromkeys(("head_dim", "swa_head_dim"), 16),
        "shared_experts_intermediate_size": 16,
    },
    "dots3_note_vision_encoder": {
        "pyramid_num_routed": [-1, 4, 4, 4],
        "adapter_in_dim": 32,
        "adapter_out_dim": 32,
    },
    "dots3_note_audio_encoder": {
        "adapter_input_size": 32,
        "adapter_out_dim": 32,
        "num_key_value_heads": 4,
    },
    "fuyu": {"text_config": {"model_type": "persimmon", **PLAIN}},
    **dict.fromkeys(("gemma3", "shieldgemma2"), GEMMA3),
    "gemma3n_text": {
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8},
    "gemma4_unified_vision": {"mm_embed_dim": 32, "mm_posemb_size": 32},
    "got_ocr2": {
        "vision_config": {**PLAIN, "mlp_dim": 48, "output_channels": 16, "image_size": 64},
        "text_config": PLAIN_QWEN2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "kimi_linear": {
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        **MLA,
    },
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 2},
    "mamba2": {"num_heads": 8},
    "moss_transcribe_diarize": {"text_config": PLAIN_QWEN2, "audio_config": WHISPER},
    "moshi": {"audio_vocab_size": 50},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "roc_bert": {"pronunciation_vocab_size": 50, "shape_vocab_size": 50},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"] * 2},
    "zamba": {"layer_types": ["linear_attention", "linear_attention", "hybrid", "hybrid"]},
    "zamba2": {
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Other fields by model_type."""


def tiny_config(model_type: str, *, decodes: bool = False, **changes: Any) -> Any:
    """A config of a few thousand parameters. `decodes`: of a causal language model.

    Raises what its class raises where it cannot be.
    """
    config_class = transformers.CONFIG_MAPPING[model_type]
    parts = {
        name: getattr(part, "config_class", part) for name, part in config_class.sub_configs.items()
    }
    parts = {
        name: _sizes(part, decodes)
        for name, part in parts.items()
        if part is not transformers.AutoConfig
    }
    own = {**_sizes(config_class, decodes), **changes}
    return config_class(
        **{**own, **{name: {**part, **own.get(name, {})} for name, part in parts.items()}}
    )


def _sizes(config_class: Any, decodes: bool) -> dict[str, Any]:
    known = {
        *getattr(config_class, "__dataclass_fields__", ()),
        *(config_class.attribute_map or {}),
    }
    own = {name: size for name, size in SIZES.items() if name in known}
    if decodes and "is_decoder" in known:
        own["is_decoder"] = True
    return {**own, **OTHERS.get(config_class.model_type, {})}


def build(model_type: str, architecture: str, config: Any = None, **changes: Any) -> Any:
    """A model of random weights, in float32. Raises what transformers raises where it cannot be
    built, and ValueError where it is not tiny."""
    model_class = getattr(transformers, architecture)
    given = config is not None
    if not given:
        config = tiny_config(model_type, **changes)
    if not given and type(config) is not model_class.config_class:
        # Mappings of text models name the types of their pictures' models, too.
        config = config.get_text_config()
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in model_class(config).parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"its recipe gives it {num_parameters} parameters")
    torch.manual_seed(0)
    model = model_class(config)
    computed = {
        name: model.get_parameter(name).clone() for name in model._keys_to_ignore_on_save or ()
    }
    randomize(model)
    with torch.no_grad():
        # A checkpoint does not hold what a model computes, as sinusoidal positions.
        for name, values in computed.items():
            model.get_parameter(name).copy_(values)
    return model.eval()


def save(
    model_type: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    *,
    architecture: str | None = None,
    **changes: Any,
) -> Any:
    """Writes a checkpoint of random weights; returns the model of transformers. By default it is
    the causal language model of the type."""
    if architecture is None:
        architecture = CAUSAL[model_type]
        changes = {"decodes": True, **changes}
    model = build(model_type, architecture, **changes)
    if dtype is not torch.float32:
        # A cast takes the imaginary part of complex buffers, whatever it is to.
        model.to(dtype)
    model.save_pretrained(folder)
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(
        str(folder / "tokenizer.json")
    )
    return model
