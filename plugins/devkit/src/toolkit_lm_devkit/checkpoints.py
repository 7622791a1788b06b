"""Small checkpoints in Hugging Face layout, each with a byte-level tokenizer. Needs neither
transformers nor tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
"""Their ids are 0, 1 and 2."""
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if "
    "add_generation_prompt %}[assistant]{% endif %}"
)


def make_checkpoint(folder: Path, hf_model: Any, **save_options: Any) -> Path:
    """Writes a model of transformers, and a tokenizer for its vocabulary; returns the folder.

    `save_options` are those of `save_pretrained`, such as max_shard_size.
    """
    hf_model.save_pretrained(folder, **save_options)
    return write_tokenizer(folder, hf_model.config.vocab_size)


def save_random(folder: Path, hf_model: Any, **save_options: Any) -> Path:
    """Draws the weights of a model of transformers anew, and writes it without a tokenizer; returns
    the folder.

    `save_options` are those of `save_pretrained`.
    """
    randomize(hf_model)
    hf_model.eval().save_pretrained(folder, **save_options)
    return folder


def write_checkpoint(
    folder: Path, hf_config: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> Path:
    """Writes config.json, model.safetensors, and a tokenizer for `hf_config["vocab_size"]`; returns
    the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(hf_config)))
    save_file(
        {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in weights.items()
        },
        folder / "model.safetensors",
    )
    return write_tokenizer(folder, hf_config["vocab_size"])


def write_tokenizer(folder: Path, vocab_size: int) -> Path:
    """Writes a tokenizer with one token per byte: ids from vocab_size - 256 on, below it
    SPECIAL_TOKENS; returns the folder."""
    first = vocab_size - 256
    if first < len(SPECIAL_TOKENS):
        raise ValueError(
            f"a byte-level tokenizer needs a vocabulary of {256 + len(SPECIAL_TOKENS)} tokens at "
            f"least, not {vocab_size}."
        )
    special = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token} | flags for token, i in special.items()],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": special | {c: i for i, c in enumerate(_byte_letters(), first)},
            "merges": [],
        },
    }
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Draws all parameters anew, those too that start as 0 or 1 (biases, norms): a parameter that
    is not loaded then shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            values = torch.randn(param.shape, generator=generator) * 0.2 + float(param.ndim == 1)
            param.copy_(values)


def _byte_letters() -> list[str]:
    """The 256 characters that stand for bytes in byte-level tokenizers (GPT-2): printable ones for
    themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return sorted(chr(code) for code in [*printable, *range(256, 256 + 256 - len(printable))])
