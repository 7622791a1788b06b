"""Common parts of the tests of pooling adapters: sizes, a prompt, and a converted model's results
without an engine."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from toolkit_lm.model import load_model
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import checkpoint_config, forward

SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
IDS = torch.tensor([7, 3, 99, 41, 12, 7, 60])


def config_of(folder: Path, **options):
    """The config of a checkpoint folder."""
    return checkpoint_config(folder, **{"max_model_len": 64, **options})


def load(convert, model_class, folder: Path, **options):
    """The converted model of a checkpoint folder, as one rank holds it."""
    config = config_of(folder, **options)
    return load_model(convert(model_class, config), config, torch.device("cpu"), Plugins.load())


def pooled(*stages, **params):
    """Outputs of a model's pooler for IDS; `stages` are those of a pipeline, usually one."""
    return forward.pooled(stages, [IDS], **params)[0]


def save_tokenizer(folder: Path, **words: int) -> None:
    """A tokenizer of single words: those given, and "w5" for each other id."""
    vocab = {f"w{i}": i for i in range(SMALL["vocab_size"]) if i not in words.values()} | words
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
