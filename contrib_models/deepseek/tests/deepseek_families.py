"""Small checkpoints of the families, as transformers makes them."""

import transformers
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    LongcatFlashConfig,
    MiniCPM3Config,
)

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


INDEXER = {"index_n_heads": 8, "index_head_dim": 12, "n_group": 2, "topk_group": 2}
V32 = {
    "few of many, sharpened": {"index_topk": 7, "rope_parameters": YARN},
    "all of most": {"index_topk": 48, "mlp_layer_types": ["sparse", "dense"]},
}
DSA = {
    "each its own": {"index_topk": 7},
    "shared, all sparse": {
        "index_topk": 5,
        "indexer_types": ["full", "shared"],
        "first_k_dense_replace": 0,
    },
}
GLM = {
    "dense first": {**GROUPS, "n_shared_experts": 1},
    "sparse first": {"mlp_layer_types": ["sparse", "dense"], "q_lora_rank": None},
}
GLM45 = {
    "biases, head norms": {**GROUPS, "attention_bias": True, "use_qk_norm": True, "head_dim": 12},
    "all rotated, all sparse": {
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "num_key_value_heads": 1,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
        },
    },
}
MINICPM3 = {
    "scaled": {"scale_emb": 5, "dim_model_base": 16},
    "no scales, untied, sharpened": {
        "scale_depth": None,
        "dim_model_base": None,
        "q_lora_rank": None,
        "tie_word_embeddings": False,
        "rope_parameters": YARN,
    },
}
LONGCAT = {
    "routed experts alone": {"zero_expert_num": 0},
    "zero experts, sharpened": {"rope_parameters": YARN},
}
KIMI = {
    "dense first": {},
    "all sparse, latent queries": {
        "linear_head_dim": 8,
        "layer_types": ["full_attention", "linear_attention"],
        "mlp_layer_types": ["sparse", "sparse"],
        "q_lora_rank": 14,
        "n_group": 2,
        "topk_group": 2,
        "norm_topk_prob": False,
    },
}


def make_v2(**changes):
    return transformers.DeepseekV2ForCausalLM(DeepseekV2Config(**{**SHAPE, **changes})).eval()


def make_v3(**changes):
    return transformers.DeepseekV3ForCausalLM(
        DeepseekV3Config(**{**SHAPE, **GROUPS, **changes})
    ).eval()


def make_v32(**changes):
    own = {**SHAPE, **INDEXER, **changes}
    return transformers.DeepseekV32ForCausalLM(DeepseekV32Config(**own)).eval()


def make_dsa(**changes):
    own = {**SHAPE, **INDEXER, **changes}
    return transformers.GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**own)).eval()


def make_glm(**changes):
    return transformers.Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**{**SHAPE, **changes})).eval()


def make_glm45(**changes):
    latent = {"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
    shape = {key: value for key, value in SHAPE.items() if key not in latent}
    shape |= {"num_key_value_heads": 2, "num_mtp_layers": 0}
    return transformers.Glm4MoeForCausalLM(Glm4MoeConfig(**{**shape, **changes})).eval()


def make_minicpm3(**changes):
    """Its values are as long as hidden_size over heads, which config.json need not state."""
    shape = {key: value for key, value in SHAPE.items() if key != "v_head_dim"}
    return transformers.MiniCPM3ForCausalLM(MiniCPM3Config(**{**shape, **changes})).eval()


def make_kimi(**changes):
    own = {
        # Two ranks do not divide it.
        "vocab_size": 273,
        "q_lora_rank": None,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "num_local_experts": 4,
        # All of them: a choice that rounding in bfloat16 turns is an error of another kind.
        "num_experts_per_tok": 4,
        # A random query and key are often nearly orthogonal.
        "rms_norm_eps": 0.4,
        "layer_types": ["linear_attention", "full_attention"],
    }
    others = {"first_k_dense_replace", "n_routed_experts"}
    shape = {key: value for key, value in SHAPE.items() if key not in others}
    config = transformers.KimiLinearConfig(**{**shape, **own, **changes})
    return transformers.KimiLinearForCausalLM(config).eval()


def make_longcat(**changes):
    """Of the four experts that give a token back, transformers writes gates, which are not
    used."""
    own = {
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 3,
        "zero_expert_num": 4,
        "head_dim": 8,
        "routed_scaling_factor": 2.0,
    }
    others = {"num_hidden_layers", "intermediate_size", "moe_intermediate_size"}
    others |= {"num_experts_per_tok", "first_k_dense_replace", "n_shared_experts"}
    shape = {key: value for key, value in SHAPE.items() if key not in others}
    config = LongcatFlashConfig(**{**shape, **own, **changes})
    return transformers.LongcatFlashForCausalLM(config).eval()


FAMILIES = {
    "DeepseekV2ForCausalLM": (make_v2, V2),
    "DeepseekV3ForCausalLM": (make_v3, V3),
    "DeepseekV32ForCausalLM": (make_v32, V32),
    "Glm4MoeForCausalLM": (make_glm45, GLM45),
    "Glm4MoeLiteForCausalLM": (make_glm, GLM),
    "GlmMoeDsaForCausalLM": (make_dsa, DSA),
    "KimiLinearForCausalLM": (make_kimi, KIMI),
    "LongcatFlashForCausalLM": (make_longcat, LONGCAT),
    "MiniCPM3ForCausalLM": (make_minicpm3, MINICPM3),
}
