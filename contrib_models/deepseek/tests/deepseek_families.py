"""Small checkpoints of the families, as transformers makes them."""

import transformers
from transformers import DeepseekV2Config, DeepseekV3Config

SHAPE = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
SIZE = 24
"""Numbers that are cached per token: kv_lora_rank + qk_rope_head_dim."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
GROUPS = {"n_group": 4, "topk_group": 2}
V2 = {
    "lite": {"q_lora_rank": None},
    "groups": {**GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0},
    "biases, sharpened": {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN},
}
V3 = {
    "groups, sharpened": {**GROUPS, "rope_parameters": YARN},
    "one group, unnormalized, halves": {
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "rope_interleave": False,
        "n_shared_experts": 1,
    },
}


def make_v2(**changes):
    return transformers.DeepseekV2ForCausalLM(DeepseekV2Config(**{**SHAPE, **changes})).eval()


def make_v3(**changes):
    return transformers.DeepseekV3ForCausalLM(
        DeepseekV3Config(**{**SHAPE, **GROUPS, **changes})
    ).eval()
