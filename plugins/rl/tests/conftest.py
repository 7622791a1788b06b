"""Checkpoints and engines of these tests."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm_devkit import randomize
from transformers import Qwen2Config, Qwen2ForCausalLM

SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def policies(tmp_path_factory):
    """Folders of two checkpoints of one model, with other weights."""
    folder = tmp_path_factory.mktemp("policies")
    for name, seed in (("old", 0), ("new", 7)):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, dtype="float32")).eval()
        randomize(model, seed)
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture
def anyio_backend():
    return "asyncio"
