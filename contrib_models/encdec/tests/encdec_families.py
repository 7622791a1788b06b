"""Small checkpoints of every family, in several variants, as transformers writes them."""

import copy
import importlib

import torch
import transformers
from toolkit_lm_devkit import randomize
from toolkit_lm_encdec import MODELS

VOCAB_SIZE = 101
SPECIAL_TOKENS = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "decoder_start_token_id": 3,
    "forced_eos_token_id": None,
}
BART_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 80,
    "scale_embedding": True,
}
T5_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "d_kv": 32,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    # Some distances of the tests are beyond it.
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 20,
}

GEMMA_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 80,
    "query_pre_attn_scalar": 120,
    # Shorter than some sequences of either side.
    "sliding_window": 16,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
    **SPECIAL_TOKENS,
}
# Without caps, scores of random weights are so large that the rounding of transformers comes to
# 1e-4. These are half as large.
NO_CAPS = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": 480,
}

VARIANTS = {
    "BartForConditionalGeneration": {
        "shared": {**BART_LIKE, "activation_function": "gelu"},
        "unscaled, apart": {
            **BART_LIKE,
            "scale_embedding": False,
            "tie_word_embeddings": False,
            "activation_function": "relu",
        },
    },
    "MBartForConditionalGeneration": {"shared": {**BART_LIKE, "activation_function": "gelu_new"}},
    "PegasusForConditionalGeneration": {"shared": {**BART_LIKE, "activation_function": "relu"}},
    "MarianMTModel": {
        "one vocabulary": {**BART_LIKE, "activation_function": "swish"},
        "two vocabularies": {
            **BART_LIKE,
            "activation_function": "swish",
            "share_encoder_decoder_embeddings": False,
            "decoder_vocab_size": VOCAB_SIZE - 8,
        },
    },
    "T5ForConditionalGeneration": {
        "first release": {**T5_LIKE, "feed_forward_proj": "relu"},
        "1.1": {**T5_LIKE, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "silu": {**T5_LIKE, "feed_forward_proj": "gated-silu", "num_decoder_layers": None},
    },
    "MT5ForConditionalGeneration": {"plain": T5_LIKE},
    "T5GemmaForConditionalGeneration": {
        "two sizes": {
            "vocab_size": VOCAB_SIZE,
            "encoder": {
                **GEMMA_LIKE,
                "hidden_size": 48,
                "num_hidden_layers": 3,
                "num_key_value_heads": 4,
            },
            "decoder": GEMMA_LIKE,
        },
        "apart, no soft caps": {
            "vocab_size": VOCAB_SIZE,
            "tie_word_embeddings": False,
            "encoder": {**GEMMA_LIKE, **NO_CAPS},
            "decoder": {**GEMMA_LIKE, **NO_CAPS, "attention_bias": True},
        },
    },
}
CASES = [
    (architecture, variant) for architecture, variants in VARIANTS.items() for variant in variants
]


def our_class(architecture):
    module, name = MODELS[architecture][0].split(":")
    return getattr(importlib.import_module(f"toolkit_lm_encdec.{module}"), name)


def make_model(architecture, fields):
    """The model of transformers, in float32, with random weights, but for the positions that are
    computed."""
    reference_class = getattr(transformers, architecture)
    model = reference_class(
        reference_class.config_class(
            **{**SPECIAL_TOKENS, "dtype": "float32", **copy.deepcopy(fields)}
        )
    ).eval()
    randomize(model)
    for name, module in model.named_modules():
        if hasattr(module, "create_weight"):
            module.weight.data.copy_(module.create_weight())
        if name.endswith("Attention.q"):
            # Nothing else scales the scores. Without it they are so large that the rounding of
            # transformers comes to 1e-4.
            module.weight.data.mul_(module.out_features**-0.5)
    if hasattr(model, "final_logits_bias"):
        generator = torch.Generator().manual_seed(3)
        model.final_logits_bias.copy_(
            torch.randn(model.final_logits_bias.shape, generator=generator)
        )
    return model


def make_checkpoint(architecture, fields, folder):
    """Writes a checkpoint; returns the model of transformers."""
    model = make_model(architecture, fields)
    model.save_pretrained(folder)
    return model


def reference_logits(model, encoder_ids, token_ids):
    """Logits [T, V] by transformers."""
    with torch.inference_mode():
        return model(input_ids=encoder_ids[None], decoder_input_ids=token_ids[None]).logits[0]
