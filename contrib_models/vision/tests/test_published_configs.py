"""Models of the sizes, and the sparse config.json files, that are published: their weights are
those of transformers' models."""

from __future__ import annotations

import json

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
}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_fit(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))
    weights = dict(theirs.state_dict())
    if theirs.config.tie_word_embeddings or name != "llava-1.5-7b":
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
    ((_, data),) = model.example_items()
    found = rules.replacement("image", {name: array.to_numpy() for name, array in data.items()})
    assert len(found.token_ids) - 2 * rules.bidirectional == {
        "llava-1.5-7b": 576,
        "llava-interleave-qwen-0.5b": 729,
    }.get(name, 256)
