"""Small checkpoints of every family, as transformers writes them."""

import copy
import importlib

import torch
import transformers
from toolkit_lm_devkit import load_checkpoint, save_random
from toolkit_lm_encoder import MODELS

VOCAB_SIZE = 101
BERT_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "num_labels": 3,
}
ROBERTA_LIKE = {**BERT_LIKE, "pad_token_id": 1, "type_vocab_size": 1}
MODERN = {
    **BERT_LIKE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
ROTARY = {**BERT_LIKE, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}

SHORT = {**BERT_LIKE, "embedding_size": 20}
DEBERTA = {
    **BERT_LIKE,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "pooler_hidden_act": "gelu",
}

VARIANTS = {
    "Bert": {
        "plain": BERT_LIKE,
        "other sizes": {
            **BERT_LIKE,
            "hidden_act": "gelu_new",
            "type_vocab_size": 3,
            "layer_norm_eps": 1e-3,
        },
    },
    "Roberta": {"plain": ROBERTA_LIKE, "padding elsewhere": {**ROBERTA_LIKE, "pad_token_id": 4}},
    "XLMRoberta": {"plain": ROBERTA_LIKE},
    "Camembert": {"plain": ROBERTA_LIKE},
    "DistilBert": {
        "plain": {
            "vocab_size": VOCAB_SIZE,
            "dim": 48,
            "hidden_dim": 80,
            "n_layers": 3,
            "n_heads": 4,
            "max_position_embeddings": 80,
            "num_labels": 3,
        }
    },
    "MPNet": {"plain": BERT_LIKE},
    "ModernBert": {
        "windows": {**MODERN, "local_attention": 8, "num_hidden_layers": 5},
        "biases": {
            **MODERN,
            "local_attention": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
        },
    },
    "NomicBert": {"plain": {**ROTARY, "pad_token_id": 0}},
    "Gte": {
        "plain": ROTARY,
        "no types": {**ROTARY, "type_vocab_size": 0},
        "two types": {**ROTARY, "type_vocab_size": 2},
    },
    "JinaEmbeddingsV3": {"plain": {**ROTARY, "type_vocab_size": 1}},
    "Electra": {"plain": SHORT, "no projection": {**BERT_LIKE, "embedding_size": 48}},
    "Albert": {
        "plain": {**SHORT, "pad_token_id": 0},
        "groups": {
            **SHORT,
            "num_hidden_layers": 5,
            "num_hidden_groups": 2,
            "inner_group_num": 2,
        },
    },
    "XLMRobertaXL": {"plain": ROBERTA_LIKE},
    "DebertaV2": {
        "v3": DEBERTA,
        "own projections": {
            **DEBERTA,
            "share_att_key": False,
            "type_vocab_size": 2,
            "position_biased_input": True,
            "norm_rel_ebd": "none",
            "position_buckets": -1,
            "max_relative_positions": 20,
            "pooler_hidden_act": "tanh",
        },
        "convolution": {**DEBERTA, "conv_kernel_size": 3, "conv_act": "gelu", "conv_groups": 2},
        "one term": {**DEBERTA, "pos_att_type": "c2p", "share_att_key": False},
        "no terms": {**DEBERTA, "relative_attention": False},
    },
}
LENGTHS = (7, 33, 1, 21, 33)
MAX_MODEL_LEN = 64
CASES = [(family, variant) for family, variants in VARIANTS.items() for variant in variants]


def our_class(architecture):
    module, name = MODELS[architecture].split(":")
    return getattr(importlib.import_module(f"toolkit_lm_encoder.{module}"), name)


def make_model(architecture, fields):
    """The model of transformers, in float32."""
    reference_class = getattr(transformers, architecture)
    # A config changes its rope_parameters in place.
    return reference_class(
        reference_class.config_class(**{"dtype": "float32", **copy.deepcopy(fields)})
    )


def make_checkpoint(architecture, fields, folder):
    """Writes a checkpoint; returns the model of transformers."""
    model = make_model(architecture, fields)
    save_random(folder, model)
    return model


def load(model_class, folder, **options):
    """The model of a checkpoint folder, as one rank holds it."""
    return load_checkpoint(model_class, folder, **{"max_model_len": MAX_MODEL_LEN, **options})


def random_sequences():
    """Token ids, none of them special."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
