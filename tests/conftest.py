"""Small random checkpoints that transformers writes, for tests that span distributions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer with one token per byte, ids from vocab_size - 256 on; below it <s>, </s> and <pad>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    first = vocab_size - 256
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1, "<pad>": 2} | {c: i + first for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def make_llama(tmp_path_factory):
    """A function (name, **LlamaConfig fields) -> (folder, transformers model in eval mode)."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str, save_options: dict[str, Any] | None = None, **fields: Any) -> tuple[Path, Any]:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        key = json.dumps([name, save_options, fields], sort_keys=True)
        if key not in made:
            shape = {
                "vocab_size": 272,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 256,
                "bos_token_id": 0,
                "eos_token_id": 1,
                "pad_token_id": 2,
                "initializer_range": 0.2,
                "dtype": "float32",
            } | fields
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**shape)).to(getattr(torch, shape["dtype"])).eval()
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder, **(save_options or {}))
            _save_tokenizer(folder, shape["vocab_size"])
            made[key] = folder, model
        return made[key]

    return make
