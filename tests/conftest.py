"""Small random checkpoints that transformers writes, for tests that span distributions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llm_toolkit.testing import make_checkpoint


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
            made[key] = make_checkpoint(tmp_path_factory.mktemp(name), model, **(save_options or {})), model
        return made[key]

    return make
