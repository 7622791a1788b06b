"""Fixtures of GGUF files."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gguf_tokenizers import TEXTS
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from toolkit_lm_gguf.tokenizer import SPLITS


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache, which is empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def byte_level() -> dict[str, Any]:
    """Tokens, their types and merges, trained on `TEXTS`."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS["llama-bpe"][0]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|begin|>", "<|im_end|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    vocab = made.get_vocab()
    merges = json.loads(made.to_str())["model"]["merges"]
    return {
        "tokens": sorted(vocab, key=vocab.get),
        "token_type": [3, 3, 4] + [1] * (len(vocab) - 3),
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
