"""Small mixtures of experts, as transformers makes them."""

import copy

import torch
from toolkit_lm_moe.gemma4 import Gemma4ForCausalLM
from toolkit_lm_moe.gpt_oss import GptOssForCausalLM
from toolkit_lm_moe.llama4 import Llama4ForCausalLM
from toolkit_lm_moe.mixtral import MixtralForCausalLM
from toolkit_lm_moe.qwen3_moe import Qwen3MoeForCausalLM
from transformers import (
    Gemma4ForCausalLM as HFGemma4,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM as HFGptOss,
    Llama4ForCausalLM as HFLlama4,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM as HFMixtral,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM as HFQwen3Moe,
)

# Shorter than some prompts of the tests, and long enough that eight sequences do not fit a tight
# pool.
WINDOW = 40
SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MIXTRAL = {
    "2 of 4": {},
    "1 of 4, tied": {
        "num_experts_per_tok": 1,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "4 of 8": {"num_experts_per_tok": 4, "num_local_experts": 8, "head_dim": 24},
    "window": {"sliding_window": WINDOW, "hidden_act": "gelu"},
}
QWEN3_MOE = {
    "4 of 8": {"num_experts_per_tok": 4, "num_local_experts": 8, "norm_topk_prob": True},
    "unnormalized, biases": {"num_experts_per_tok": 2, "attention_bias": True, "head_dim": 24},
    "1 of 8, dense between": {
        "num_experts_per_tok": 1,
        "num_local_experts": 8,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
    },
    "all of 4, some dense, window, tied": {
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "num_hidden_layers": 3,
        "mlp_only_layers": [0, 2],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
    },
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
GPT_OSS = {
    # The limit is one that random weights reach.
    "4 of 8, yarn": {
        "num_experts_per_tok": 4,
        "num_local_experts": 8,
        "sliding_window": WINDOW,
        "rope_parameters": YARN,
        "swiglu_limit": 0.5,
    },
    "1 of 4, all windows, tied": {
        "num_experts_per_tok": 1,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "swiglu_alpha": 1.1,
        "tie_word_embeddings": True,
    },
}
GEMMA4 = {
    "experts, keys that are values": {
        # The owner of the keys that the last layer reads is on the same one of two stages.
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 1,
        "enable_moe_block": True,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 3.0,
        # All other scalings can be made of it.
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 1.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "dense, half of the layers shared": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 272,
    },
    "no embeddings of layers, none shared": {
        "num_hidden_layers": 2,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
    },
}
LLAMA4 = {
    "chunks, tuned": {"attention_chunk_size": WINDOW, "floor_scale": 16, "attn_scale": 0.4},
    "dense between, no norms, one chunk": {
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 4,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "no_rope_layers": [1, 1, 0, 1],
    },
    "all layers chunked, 2 of 4": {
        "num_experts_per_tok": 2,
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention"] * 2,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
}
FAMILIES = {
    "llama4": (Llama4ForCausalLM, LLAMA4),
    "gemma4": (Gemma4ForCausalLM, GEMMA4),
    "mixtral": (MixtralForCausalLM, MIXTRAL),
    "qwen3_moe": (Qwen3MoeForCausalLM, QWEN3_MOE),
    "gpt_oss": (GptOssForCausalLM, GPT_OSS),
}
SPLIT = ("mixtral", "qwen3_moe")
"""Families whose checkpoints have tensors for each expert."""
CASES = [(family, variant) for family, (_, variants) in FAMILIES.items() for variant in variants]


def make_mixtral(**changes):
    return HFMixtral(MixtralConfig(**{**SHAPE, **changes})).eval()


def make_qwen3_moe(**changes):
    shape = {**SHAPE, "head_dim": 16, "moe_intermediate_size": 48, **changes}
    shape["num_experts"] = shape.pop("num_local_experts")
    return HFQwen3Moe(Qwen3MoeConfig(**shape)).eval()


def make_gpt_oss(**changes):
    shape = {**SHAPE, "head_dim": 16, **copy.deepcopy(changes)}
    return HFGptOss(GptOssConfig(**shape)).eval()


def make_gemma4(**changes):
    layers = changes["num_hidden_layers"]
    shape = {
        **SHAPE,
        "head_dim": 16,
        "global_head_dim": 24,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        # Sums over few dimensions may be near zero, and are normed, rounding and all.
        "hidden_size_per_layer_input": 48,
        "vocab_size_per_layer_input": 272,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
        **copy.deepcopy(changes),
    }
    del shape["num_local_experts"]
    return HFGemma4(Gemma4TextConfig(**shape)).eval()


def make_llama4(**changes):
    shape = {
        **SHAPE,
        "head_dim": 16,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 80,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 8192,
        **changes,
    }
    return HFLlama4(Llama4TextConfig(**shape)).eval()


MAKERS = {
    "llama4": make_llama4,
    "gemma4": make_gemma4,
    "mixtral": make_mixtral,
    "qwen3_moe": make_qwen3_moe,
    "gpt_oss": make_gpt_oss,
}


def make(family, variant):
    maker = MAKERS[family]
    return maker(**FAMILIES[family][1][variant])


def reference_logits(model, input_ids):
    """Logits [T, V] by transformers."""
    with torch.inference_mode():
        return model(input_ids[None]).logits[0]
