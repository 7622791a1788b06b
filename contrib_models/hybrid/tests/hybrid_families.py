"""Small checkpoints of every family, as transformers makes them."""

import copy

import transformers

# At least 259, for the tokenizer of the kit; neither two nor four ranks divide it.
VOCAB_SIZE = 273
SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
QWEN3_NEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    # A random query and key are often nearly orthogonal: the norm of what a layer reads would make
    # the rounding of both sides a visible difference.
    "rms_norm_eps": 0.4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
}
# All of them first: a choice that rounding in bfloat16 turns is an error of another kind.
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
}
MAMBA2 = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 0.1,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 4,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
GRANITE = {
    **MAMBA2,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
RECURRENT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_norm_epsilon": 0.1,
}
NEMOTRON_H = {
    **{key: RECURRENT[key] for key in ("vocab_size", "hidden_size", "layer_norm_epsilon")},
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 4,
    "ssm_state_size": 8,
    "chunk_size": 16,
}
PLAIN = {key: value for key, value in MAMBA2.items() if not key.startswith("mamba")}
LFM3 = {
    **{key: value for key, value in PLAIN.items() if key != "rms_norm_eps"},
    "num_hidden_layers": 3,
    "head_dim": 8,
    "norm_eps": 0.1,
    "sliding_window": 5,
}
OLMO_HYBRID = {
    **PLAIN,
    "num_hidden_layers": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
}
ZAMBA2 = {
    **{key: value for key, value in PLAIN.items() if key != "num_key_value_heads"},
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
    "mamba_d_state": 8,
    "n_mamba_heads": 8,
    "mamba_ngroups": 4,
    "adapter_rank": 4,
}
VARIANTS = {
    "BambaForCausalLM": {
        "four groups, steps limited": {
            **MAMBA2,
            "attn_layer_indices": [1],
            "time_step_limit": [0.3, 0.9],
        },
        "one group, biases, tied": {
            **MAMBA2,
            "attn_layer_indices": [0],
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    },
    "FalconH1ForCausalLM": {
        "factors": {
            **MAMBA2,
            "mamba_d_ssm": 64,
            "lm_head_multiplier": 0.7,
            "embedding_multiplier": 2.0,
            "mlp_multipliers": [0.8, 0.6],
            "key_multiplier": 0.5,
            "attention_out_multiplier": 0.9,
            "attention_in_multiplier": 1.1,
            "ssm_multipliers": [0.9, 0.8, 0.7, 1.2, 1.1],
            "ssm_in_multiplier": 0.8,
            "ssm_out_multiplier": 0.6,
        },
        "normed, biases": {
            **MAMBA2,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "projectors_bias": True,
            "mamba_proj_bias": True,
        },
    },
    "FalconMambaForCausalLM": {"tied": {**RECURRENT, "mixer_rms_eps": 0.1}},
    "GraniteMoeHybridForCausalLM": {
        "experts": {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 4},
        "dense, rotary": {**GRANITE, "num_local_experts": 0, "position_embedding_type": "rope"},
    },
    "JambaForCausalLM": {
        "experts, attention": {
            **{key: value for key, value in MAMBA2.items() if not key.startswith("mamba")},
            "mamba_d_state": 8,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 4,
        },
        "dense, tied": {
            **{key: value for key, value in MAMBA2.items() if not key.startswith("mamba")},
            "mamba_dt_rank": 3,
            "mamba_proj_bias": True,
            "attn_layer_period": 2,
            "attn_layer_offset": 0,
            "num_experts": 1,
            "tie_word_embeddings": True,
        },
    },
    "Lfm2ForCausalLM": {
        "adjusted": {
            **{key: value for key, value in MAMBA2.items() if not key.startswith("mamba")},
            "layer_types": ["conv", "full_attention"],
            "intermediate_size": 60,
            "block_multiple_of": 16,
            "tie_word_embeddings": True,
        },
        "biases": {
            **{key: value for key, value in MAMBA2.items() if not key.startswith("mamba")},
            "layer_types": ["full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
    },
    "Lfm2MoeForCausalLM": {
        "one dense": {
            **PLAIN,
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 0.7,
        },
        "no bias, untied": {
            **PLAIN,
            "layer_types": ["full_attention", "conv"],
            "conv_bias": True,
            "num_dense_layers": 0,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
    },
    "Lfm3ForCausalLM": {
        "all kinds": {**LFM3, "layer_types": ["sliding_attention", "conv", "full_attention"]},
        "no gates, no norms": {
            **LFM3,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "conv_bias": True,
            "attention_bias": True,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "tie_word_embeddings": False,
        },
    },
    "Mamba2ForCausalLM": {
        "four groups": {**RECURRENT, "num_heads": 8, "head_dim": 8, "n_groups": 4, "state_size": 8}
    },
    "MambaForCausalLM": {
        "tied": RECURRENT,
        "biases": {
            **RECURRENT,
            "use_bias": True,
            "use_conv_bias": False,
            "state_size": 5,
            "tie_word_embeddings": False,
        },
    },
    "NemotronHForCausalLM": {
        "all kinds": {
            **NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 24,
            "moe_latent_size": 24,
        },
        "dense": {**NEMOTRON_H, "layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    },
    "OlmoHybridForCausalLM": {
        "no positions": {
            **OLMO_HYBRID,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
        "rotary, grouped": {
            **OLMO_HYBRID,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "linear_allow_neg_eigval": False,
            "linear_num_value_heads": 4,
            "num_key_value_heads": 2,
            "attention_bias": True,
        },
    },
    "Qwen3NextForCausalLM": {
        "experts": {**QWEN3_NEXT, **EXPERTS},
        "some dense, tied": {
            **QWEN3_NEXT,
            **EXPERTS,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 3,
        },
    },
    "Qwen3_5ForCausalLM": {
        "dense": QWEN3_NEXT,
        "four layers": {
            **QWEN3_NEXT,
            "num_hidden_layers": 4,
            "layer_types": None,
            "attention_bias": True,
        },
    },
    "Qwen3_5MoeForCausalLM": {
        "experts": {
            **{key: value for key, value in QWEN3_NEXT.items() if key != "intermediate_size"},
            **EXPERTS,
        }
    },
    "RecurrentGemmaForCausalLM": {
        "both kinds": {
            **{key: value for key, value in PLAIN.items() if key != "max_position_embeddings"},
            "num_key_value_heads": 1,
            "block_types": ["recurrent", "attention"],
            "attention_window_size": 6,
        },
        "a cap, biases": {
            **{key: value for key, value in PLAIN.items() if key != "max_position_embeddings"},
            "block_types": ["attention", "recurrent"],
            "attention_window_size": 6,
            "logits_soft_cap": 2.0,
            "attention_bias": True,
            "conv1d_width": 3,
        },
    },
    "RwkvForCausalLM": {
        "rescaled": {**RECURRENT, "intermediate_size": 48, "rescale_every": 1},
        "tied, not rescaled": {**RECURRENT, "rescale_every": 0, "tie_word_embeddings": True},
    },
    "Zamba2ForCausalLM": {
        "two blocks, adapters, rotary": {
            **ZAMBA2,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
        },
        "one block, biases, untied": {
            **ZAMBA2,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid", "linear_attention"],
            "num_key_value_heads": 2,
            "add_bias_linear": True,
            "tie_word_embeddings": False,
        },
    },
}


def make_model(architecture, fields):
    """The model of transformers, in float32."""
    reference_class = getattr(transformers, architecture)
    return reference_class(
        reference_class.config_class(
            **{**SPECIAL_TOKENS, "dtype": "float32", **copy.deepcopy(fields)}
        )
    )
