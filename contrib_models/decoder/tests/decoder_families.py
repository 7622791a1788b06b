"""Small checkpoints of every family, in several variants, as transformers writes them."""

import copy
import importlib
from pathlib import Path

import torch
import transformers
from toolkit_lm_decoder import MODELS
from toolkit_lm_devkit import save_random

VOCAB_SIZE = 101
# Shorter than most prompts, and longer than some: a sequence grows and then gives blocks back.
WINDOW = 16
SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
LLAMA_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GEMMA = {**LLAMA_LIKE, "head_dim": 24, "query_pre_attn_scalar": 30, "sliding_window": WINDOW}
GEMMA3N = {
    **LLAMA_LIKE,
    # The owner of the keys that the last layer reads is on the same one of two pipeline stages.
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "laurel_rank": 12,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "default", "rope_theta": 20000.0},
    },
}
OPT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
FACTORS = {
    "short_factor": [1.0 + i / 8 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
}
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        **FACTORS,
    }
}
MIXED_LAYERS = ["full_attention", "sliding_attention", "full_attention"]
LOCAL_AND_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 8.0},
}

VARIANTS = {
    "MistralForCausalLM": {
        "window": {**LLAMA_LIKE, "sliding_window": WINDOW},
        "no window, tied": {
            **LLAMA_LIKE,
            "sliding_window": None,
            "head_dim": 24,
            "tie_word_embeddings": True,
        },
    },
    "Qwen2ForCausalLM": {
        "no window": {**LLAMA_LIKE, "sliding_window": WINDOW},
        "windows in upper layers": {
            **LLAMA_LIKE,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
        "layer types, tied": {
            **LLAMA_LIKE,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": MIXED_LAYERS,
            "tie_word_embeddings": True,
        },
    },
    "Qwen3ForCausalLM": {
        "head_dim": {**LLAMA_LIKE, "head_dim": 24, "tie_word_embeddings": True},
        "biases, windows": {
            **LLAMA_LIKE,
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    },
    "Phi3ForCausalLM": {
        "window": {**LLAMA_LIKE, "sliding_window": WINDOW},
        "short longrope, partial": {
            **LLAMA_LIKE,
            **LONGROPE,
            "original_max_position_embeddings": 128,
            "tie_word_embeddings": True,
        },
        # transformers takes the long factors for sequences longer than this, which all of the
        # test's are.
        "long longrope, partial": {**LLAMA_LIKE, **LONGROPE, "original_max_position_embeddings": 8},
    },
    "Gemma2ForCausalLM": {
        "soft caps": {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        "no soft caps": {
            **GEMMA,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": MIXED_LAYERS,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    },
    "Gemma3ForCausalLM": {
        "two rotary embeddings": {
            **GEMMA,
            "layer_types": MIXED_LAYERS,
            "rope_parameters": LOCAL_AND_GLOBAL,
        },
        "six layers": {
            **GEMMA,
            "num_hidden_layers": 6,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
        },
    },
    "Gemma3nForCausalLM": {
        "shared layers": GEMMA3N,
        "sparse gates, two streams": {
            **GEMMA3N,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "intermediate_size": [64, 96, 64, 96],
            # So few gates that their sum is near zero would be normed, and rounding with it.
            "activation_sparsity_pattern": [0.6, 0.5, 0.0, 0.0],
            "altup_num_inputs": 2,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "vocab_size_per_layer_input": 64,
        },
    },
    "GraniteForCausalLM": {
        "multipliers": {
            **LLAMA_LIKE,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
        },
        "biases, tied": {
            **LLAMA_LIKE,
            "attention_bias": True,
            "mlp_bias": True,
            "residual_multiplier": 0.7,
            "tie_word_embeddings": True,
        },
    },
    "GlmForCausalLM": {
        "biases": {**LLAMA_LIKE, "head_dim": 24, "attention_bias": True},
        "tied": {**LLAMA_LIKE, "head_dim": 16, "tie_word_embeddings": True},
    },
    "Glm4ForCausalLM": {
        "biases": {**LLAMA_LIKE, "head_dim": 16, "attention_bias": True},
        "whole heads rotated": {
            **LLAMA_LIKE,
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        },
    },
    "Olmo2ForCausalLM": {
        "grouped": LLAMA_LIKE,
        "multi-head, biases, tied": {
            **LLAMA_LIKE,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    },
    "OPTForCausalLM": {
        "norms first": OPT,
        "norms last, projected": {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
        "bare": {
            **OPT,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "_remove_final_layer_norm": True,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
    },
    "GPT2LMHeadModel": {
        "plain": GPT2,
        "scaled by layer": {
            **GPT2,
            "scale_attn_by_inverse_layer_idx": True,
            "n_inner": 80,
            "tie_word_embeddings": False,
        },
    },
}
CASES = [
    (architecture, variant) for architecture, variants in VARIANTS.items() for variant in variants
]


def our_class(architecture: str):
    return getattr(
        importlib.import_module(f"toolkit_lm_decoder.{MODELS[architecture]}"), architecture
    )


def make_model(architecture: str, fields: dict):
    """The model of transformers, in float32."""
    reference_class = getattr(transformers, architecture)
    # A config changes its rope_parameters in place.
    return reference_class(
        reference_class.config_class(
            **{**SPECIAL_TOKENS, "dtype": "float32", **copy.deepcopy(fields)}
        )
    )


def make_family(architecture: str, variant: str, folder: Path):
    """Writes a checkpoint; returns the model of transformers."""
    model = make_model(architecture, VARIANTS[architecture][variant])
    save_random(folder, model)
    return model


def reference_logits(model, input_ids):
    """Logits [T, V] by transformers."""
    with torch.inference_mode():
        return model(input_ids[None]).logits[0]
