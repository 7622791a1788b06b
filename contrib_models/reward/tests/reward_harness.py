"""Common parts of the tests of reward models: sizes, prompts, and a model's results without an
engine."""

import torch
from toolkit_lm_devkit import load_checkpoint, pooled

SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TAG = 60
PROMPTS = [
    torch.tensor([7, 3, TAG, 41, 12, 7, TAG]),
    torch.tensor([5]),
    torch.tensor([TAG, 99, 98]),
]


def load(model_class, folder, **options):
    """The model of a checkpoint folder."""
    return load_checkpoint(model_class, folder, **{"max_model_len": 64, **options})


def rewards(model, prompts=PROMPTS, **params):
    """The pooler's outputs for each prompt, all in one batch."""
    return pooled([model], prompts, task="token_classify", **params)
