"""Models of the sizes, and the sparse config.json files, that are published: their weights are
those of transformers' models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from toolkit_lm.model import construct
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import checkpoint_config
from transformers import AutoConfig, AutoModelForImageTextToText

CONFIGS = {
    "llava-1.5-7b": {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": 32000,
        "model_type": "llava",
        "pad_token_id": 32001,
        "projector_hidden_act": "gelu",
        "text_config": {
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "rms_norm_eps": 1e-05,
            "torch_dtype": "float16",
            "vocab_size": 32064,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vision_config": {
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    },
    "llava-interleave-qwen-0.5b": {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": 151646,
        "model_type": "llava",
        "projector_hidden_act": "gelu",
        "text_config": {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "max_position_embeddings": 32768,
            "max_window_layers": 21,
            "model_type": "qwen2",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "vocab_size": 152000,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 384,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 26,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "SmolVLM-256M-Instruct": {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "image_token_id": 49190,
        "model_type": "idefics3",
        "scale_factor": 4,
        "text_config": {
            "architectures": ["VLlama3ForCausalLM"],
            "head_dim": 64,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pixel_shuffle_factor": 4,
            "rms_norm_eps": 1e-05,
            "rope_theta": 100000,
            "vocab_size": 49280,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "hidden_size": 768,
            "image_size": 512,
            "max_image_size": {"longest_edge": 512},
            "model_type": "idefics3",
            "num_attention_heads": 12,
            "patch_size": 16,
            "size": {"longest_edge": 2048},
            "tie_word_embeddings": False,
        },
        "vocab_size": 49280,
    },
    "GLM-4.1V-9B-Thinking": {
        "architectures": ["Glm4vForConditionalGeneration"],
        "image_start_token_id": 151339,
        "image_token_id": 151343,
        "model_type": "glm4v",
        "text_config": {
            "attention_bias": True,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "max_position_embeddings": 65536,
            "model_type": "glm4v_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
            "rope_theta": 10000.0,
            "vocab_size": 151552,
        },
        "tie_word_embeddings": False,
        "video_token_id": 151344,
        "vision_config": {
            "attention_bias": False,
            "depth": 24,
            "hidden_act": "silu",
            "hidden_size": 1536,
            "image_size": 336,
            "intermediate_size": 13696,
            "num_heads": 12,
            "out_hidden_size": 4096,
            "patch_size": 14,
            "rms_norm_eps": 1e-05,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    "GLM-4.5V": {
        "architectures": ["Glm4vMoeForConditionalGeneration"],
        "image_start_token_id": 151339,
        "image_token_id": 151363,
        "model_type": "glm4v_moe",
        "text_config": {
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "max_position_embeddings": 65536,
            "model_type": "glm4v_moe_text",
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 96,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 46,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
            "rope_theta": 10000.0,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "use_qk_norm": False,
            "head_dim": 128,
            "vocab_size": 151552,
        },
        "tie_word_embeddings": False,
        "video_token_id": 151364,
        "vision_config": {
            "attention_bias": False,
            "depth": 24,
            "hidden_act": "silu",
            "hidden_size": 1536,
            "image_size": 336,
            "intermediate_size": 10944,
            "num_heads": 12,
            "out_hidden_size": 4096,
            "patch_size": 14,
            "rms_norm_eps": 1e-05,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    "pixtral-12b": {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_seq_length": 1,
        "image_token_index": 10,
        "model_type": "llava",
        "projector_hidden_act": "gelu",
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 14336,
            "is_composition": True,
            "max_position_embeddings": 1024000,
            "model_type": "mistral",
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "head_dim": 64,
            "hidden_act": "silu",
            "image_size": 1024,
            "is_composition": True,
            "model_type": "pixtral",
            "patch_size": 16,
            "rope_theta": 10000.0,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "Mistral-Small-3.1": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": {
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {
            "head_dim": 64,
            "hidden_act": "gelu",
            "hidden_size": 1024,
            "image_size": 1540,
            "intermediate_size": 4096,
            "model_type": "pixtral",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "rope_theta": 10000.0,
        },
        "vision_feature_layer": -1,
    },
}
GIVEN = {"SmolVLM-256M-Instruct": 64, "pixtral-12b": 1024, "Mistral-Small-3.1": 1024}
"""Tokens of the usual picture."""
UNTIED = (
    "GLM-4.1V-9B-Thinking",
    "GLM-4.5V",
    "llava-1.5-7b",
    "SmolVLM-256M-Instruct",
    "pixtral-12b",
)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_fit(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))
    weights = dict(theirs.state_dict())
    if theirs.config.tie_word_embeddings or name not in UNTIED:
        weights.pop("lm_head.weight")
    plugins = Plugins.load()
    config = checkpoint_config(tmp_path, dtype="bfloat16", max_model_len=4096)
    model = construct(
        plugins.models.load(CONFIGS[name]["architectures"][0]),
        config,
        torch.device("meta"),
        plugins,
    )
    assert model.load_weights(weights.items())
    text = theirs.config.text_config
    attention = [
        module.params for module in model.language_model.modules() if hasattr(module, "params")
    ]
    assert (
        len(attention) == text.num_hidden_layers
        and attention[0].num_kv_heads == text.num_key_value_heads
    )
    rules = plugins.models.load_multimodal(config.checkpoint.architecture)(config)
    data = dict(model.example_items())["image"]
    arrays = {name: array.to_numpy() for name, array in data.items()}
    if (count := GIVEN.get(name)) is not None:
        # No tokenizer is here, which says what stands between them.
        arrays["input_ids"] = np.full(count, rules.placeholder_id("image"))
    found = rules.replacement("image", arrays)
    marks = 2 * rules.bidirectional
    assert len(found.token_ids) - marks == {
        "GLM-4.1V-9B-Thinking": 1024,
        "GLM-4.5V": 1024,
        "llava-1.5-7b": 576,
        "llava-interleave-qwen-0.5b": 729,
        **GIVEN,
    }.get(name, 256)
