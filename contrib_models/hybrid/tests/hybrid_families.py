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
    "rms_norm_eps": 0.2,
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
VARIANTS = {
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
}


def make_model(architecture, fields):
    """The model of transformers, in float32."""
    reference_class = getattr(transformers, architecture)
    return reference_class(
        reference_class.config_class(
            **{**SPECIAL_TOKENS, "dtype": "float32", **copy.deepcopy(fields)}
        )
    )
